// The timeline of a sandbox's history: a slider over its saved states, and what each of them is.
(() => {
  "use strict";
  const byId = (id) => document.getElementById(id);
  let chosen = null; // the number of the state that the reader picked; null follows the newest

  function draw() {
    const source = byId("timeline-data");
    if (!source) return;
    const moments = JSON.parse(source.textContent);
    const slider = byId("moment");
    const at = moments.findIndex((moment) => moment.number === chosen);
    slider.max = String(moments.length - 1);
    slider.value = String(at < 0 ? moments.length - 1 : at);
    drawBars(moments);
    const short = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
    byId("moment-first").textContent = short.format(new Date(moments[0].at));
    byId("moment-last").textContent = short.format(new Date(moments.at(-1).at));
    slider.addEventListener("input", () => {
      chosen = moments[Number(slider.value)].number;
      show(moments);
    });
    show(moments);
  }

  // How much each state changed, on a scale that shows small ones beside large ones.
  function drawBars(moments) {
    const scale = (bytes) => Math.log2(1 + bytes / 65536);
    const most = Math.max(1, ...moments.map((moment) => scale(moment.changed_bytes)));
    const holder = document.querySelector("#timeline .moments");
    holder.replaceChildren(...moments.map((moment, index) => {
      const bar = document.createElement("i");
      bar.style.height = `${Math.max(6, (100 * scale(moment.changed_bytes)) / most)}%`;
      bar.classList.toggle("kept", moment.snapshots.length > 0);
      bar.addEventListener("click", () => {
        const slider = byId("moment");
        slider.value = String(index);
        slider.dispatchEvent(new Event("input"));
        slider.focus();
      });
      return bar;
    }));
  }

  function show(moments) {
    const slider = byId("moment");
    const moment = moments[Number(slider.value)];
    const exact = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" }).format(new Date(moment.at));
    slider.setAttribute("aria-valuetext", `State ${moment.number}, ${exact}, ${moment.changed} changed`);
    byId("moment-number").textContent = `#${moment.number}${moment.is_current ? " · now" : ""}`;
    const time = byId("moment-at");
    time.dateTime = moment.at;
    time.textContent = exact;
    byId("moment-kind").textContent = moment.kind;
    byId("moment-changed").textContent = `${moment.changed}, ${moment.uploaded} uploaded`;
    byId("moment-kept").textContent = moment.kept;
    byId("moment-snapshots-row").hidden = moment.snapshots.length === 0;
    byId("moment-snapshots").textContent = moment.snapshots.join(", ");
    const browse = byId("moment-browse");
    browse.href = `${browse.pathname}?path=/&generation=${moment.number}`;
    for (const form of document.querySelectorAll("#timeline form")) {
      form.elements.generation.value = String(moment.number);
      form.dataset.confirm = `${form.dataset.confirmTitle} (state #${moment.number}, ${exact})`;
    }
    document.querySelectorAll("#timeline .moments i").forEach((bar, index) => bar.classList.toggle("chosen", index === Number(slider.value)));
  }

  draw();
  // The page shows itself anew when a state is added; the slider stays where the reader put it.
  document.addEventListener("htmx:afterSwap", (event) => {
    if (event.detail.target.id !== "history" && event.detail.elt.id !== "history") return;
    const held = document.activeElement === document.body && byId("moment") && chosen !== null;
    draw();
    if (held) byId("moment").focus();
  });
})();
