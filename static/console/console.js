// What every page of the console shares: times, money, copying, dialogs, toasts, keys, live state.
(() => {
  "use strict";
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

  // -- times, in the reader's zone ---------------------------------------------------------
  const exact = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
  const short = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
  const UNITS = [["years", 2 * 31556952], ["months", 2 * 2629746], ["d", 86400], ["h", 3600], ["min", 60]];
  // From two of them on: "60 d" says more than "1 months".
  const LENGTHS = { years: 31556952, months: 2629746 };
  const span = (seconds) => {
    const found = UNITS.find(([, least]) => seconds >= least);
    return found ? `${Math.floor(seconds / (LENGTHS[found[0]] ?? found[1]))} ${found[0]}` : `${Math.floor(seconds)} s`;
  };
  const longSpan = (seconds) => {
    const parts = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]].map(([unit, length]) => {
      const whole = Math.floor(seconds / length);
      seconds -= whole * length;
      return whole ? `${whole} ${unit}` : null;
    }).filter(Boolean);
    return parts.slice(0, 2).join(" ") || "0 s";
  };
  const writeTimes = (root = document) => {
    const now = Date.now();
    for (const element of $$("time[data-time]", root)) {
      const at = new Date(element.dateTime);
      const title = exact.format(at);
      if (element.title !== title) element.title = title;
      let text;
      if (element.dataset.time === "exact") text = short.format(at);
      else {
        const since = (now - at) / 1000;
        if (Math.abs(since) < 60) text = since >= 0 ? "just now" : "in a moment";
        else text = since > 0 ? `${span(since)} ago` : `in ${span(-since)}`;
      }
      if (element.textContent !== text) element.textContent = text;
    }
  };

  // -- figures that go up by themselves: uptime, and the cost of a run ---------------------
  const tick = () => {
    for (const element of $$("[data-since]")) {
      const text = longSpan(Math.max(0, (Date.now() - Date.parse(element.dataset.since)) / 1000));
      if (element.textContent !== text) element.textContent = text;
    }
    for (const element of $$("[data-rate-per-hour]")) {
      const hours = Math.max(0, Date.now() - Date.parse(element.dataset.from)) / 3.6e6;
      const cost = Number(element.dataset.cost) + hours * Number(element.dataset.ratePerHour);
      const text = cost.toFixed(6);
      element.firstChild.textContent = `$${text.slice(0, -4)}`;
      element.lastElementChild.textContent = text.slice(-4);
    }
  };
  setInterval(tick, 1000);
  setInterval(writeTimes, 15000);

  // -- toasts --------------------------------------------------------------------------------
  const toast = (text, { bad = false } = {}) => {
    const line = document.createElement("div");
    line.className = `toast-line ${bad ? "bad" : ""}`;
    const words = document.createElement("span");
    words.textContent = text;
    const close = document.createElement("button");
    close.type = "button";
    close.setAttribute("aria-label", "Dismiss");
    close.dataset.dismiss = "";
    close.textContent = "×";
    line.append(words, close);
    $("#toasts").append(line);
    if (!bad) setTimeout(() => line.remove(), 6000);
  };
  for (const line of $$(".toast-line:not(.bad)")) setTimeout(() => line.remove(), 8000);

  // -- dialogs -------------------------------------------------------------------------------
  const confirmed = ({ title, text, action, danger }) => new Promise((resolve) => {
    const dialog = $("#confirm");
    $("#confirm-title").textContent = title;
    $("#confirm-text").textContent = text || "";
    const yes = $("#confirm-yes");
    yes.textContent = action || "Yes";
    yes.classList.toggle("btn-danger", Boolean(danger));
    yes.classList.toggle("btn-primary", !danger);
    dialog.returnValue = "no";
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
    held.asking = true;
    dialog.showModal();
  });
  const asked = (element) => ({
    title: element.dataset.confirm,
    text: element.dataset.confirmText,
    action: element.dataset.confirmAction,
    danger: "confirmDanger" in element.dataset,
  });
  document.addEventListener("htmx:confirm", (event) => {
    const element = event.detail.elt;
    if (!element.dataset.confirm) return;
    event.preventDefault();
    confirmed(asked(element)).then((yes) => { if (yes) event.detail.issueRequest(true); });
  });
  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (!form.dataset.confirm || form.dataset.confirmed || form.hasAttribute("hx-post")) return;
    event.preventDefault();
    confirmed(asked(form)).then((yes) => {
      if (!yes) return;
      form.dataset.confirmed = "yes";
      form.requestSubmit();
    });
  });

  // -- htmx ----------------------------------------------------------------------------------
  document.addEventListener("htmx:afterSwap", (event) => {
    if (event.detail.target.id === "dialog" && event.detail.target.innerHTML.trim()) {
      if (!event.detail.target.open) event.detail.target.showModal();
      $("[autofocus], input:checked, .is-invalid", event.detail.target)?.focus();
    }
  });
  document.addEventListener("htmx:load", (event) => { writeTimes(event.detail.elt); tick(); });
  document.addEventListener("htmx:beforeSwap", (event) => {
    // A form that is refused comes back with its errors; it is shown like any other answer.
    if (event.detail.xhr.status === 422) { event.detail.shouldSwap = true; event.detail.isError = false; }
  });
  document.addEventListener("htmx:responseError", (event) => {
    const { xhr, elt } = event.detail;
    if (elt.dataset.quiet !== undefined && xhr.status !== 404) return;
    if (xhr.status === 404 && elt.dataset.live) { elt.remove(); return; }
    const plain = (xhr.getResponseHeader("Content-Type") || "").startsWith("text/plain");
    toast(plain && xhr.responseText ? xhr.responseText : `That did not work (${xhr.status}).`, { bad: true });
  });
  document.addEventListener("htmx:sendError", (event) => {
    if (event.detail.elt.dataset.quiet === undefined) toast("The console does not answer. Nothing was changed.", { bad: true });
  });
  document.addEventListener("toast", (event) => toast(event.detail.text, event.detail));

  // -- clicks --------------------------------------------------------------------------------
  document.addEventListener("click", async (event) => {
    const at = (selector) => event.target.closest(selector);
    const copy = at("[data-copy]");
    if (copy) {
      try {
        await navigator.clipboard.writeText(copy.dataset.copy);
        const icon = $("i", copy);
        icon?.classList.replace("ti-copy", "ti-check");
        setTimeout(() => icon?.classList.replace("ti-check", "ti-copy"), 1500);
        toast("Copied.");
      } catch { toast("The browser did not allow copying.", { bad: true }); }
    }
    if (at("[data-dismiss]")) at(".toast-line").remove();
    if (at("[data-close]")) { event.preventDefault(); at("dialog").close(); }
    if (at("[data-theme]")) window.SandkeepTheme.choose(at("[data-theme]").dataset.theme);
    // A click on the backdrop is a click on the dialog itself.
    if (event.target.tagName === "DIALOG" && event.target.id !== "confirm") {
      const box = event.target.getBoundingClientRect();
      if (event.clientX < box.left || event.clientX > box.right || event.clientY < box.top || event.clientY > box.bottom) event.target.close();
    }
  });

  // -- keys ----------------------------------------------------------------------------------
  let prefix = null;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, textarea, select, [contenteditable], .term, .CodeMirror, dialog")) return;
    const go = (name) => { const link = $(`[data-key-link="${name}"]`) || $(`nav a[href^="/${name}/"]`); if (link) link.click(); };
    if (prefix === "g") {
      prefix = null;
      const to = { s: "sandboxes", t: "templates", u: "usage" }[event.key];
      if (to) { event.preventDefault(); go(to); }
      return;
    }
    if (event.key === "g") { prefix = "g"; setTimeout(() => { prefix = null; }, 1200); }
    if (event.key === "/") { const search = $("input[type=search]"); if (search) { event.preventDefault(); search.focus(); search.select(); } }
    if (event.key === "c") { const claim = $("[data-claim]"); if (claim) { event.preventDefault(); claim.click(); } }
    if (event.key === "?") $("#keys-help").showModal();
  });

  // -- live state ----------------------------------------------------------------------------
  // The socket says which sandbox changed; what shows it then fetches itself again. While the
  // socket is down the page says "as of" and asks every ten seconds instead.
  const POLL_MS = 10000;
  const team = document.body.dataset.team;
  const live = { socket: null, tries: 0, poll: null, pending: new Map(), asOf: new Date() };
  // What is shown is not replaced under a finger or behind a question: the button that was
  // pressed, or that asked, would be gone before the answer. It is fetched right after.
  const held = { pressed: false, asking: false, waiting: new Set() };
  const isHeld = () => held.pressed || held.asking;
  const isLive = (element) => element.matches("[data-live], [data-live-list]");
  const nameOf = (element) => (element.id ? `#${CSS.escape(element.id)}` : `[data-live="${CSS.escape(element.dataset.live)}"]`);
  const refreshList = () => { const whole = $("[data-live-list]"); if (whole) refresh(whole); };
  // Without a row the list may be empty, or short of one from the next page.
  const refreshNamed = (name) => {
    const shown = $$(name).filter(isLive);
    if (shown.length) shown.forEach(refresh); else refreshList();
  };
  // A change that comes while what shows it is being fetched may not be in the answer: it is
  // fetched once more, as whatever then stands in its place.
  const fetches = new Map();
  const refresh = (element) => {
    const fetch = fetches.get(nameOf(element));
    if (isHeld()) held.waiting.add(nameOf(element));
    else if (fetch) fetch.again = true;
    else window.htmx.trigger(element, element.matches("[data-live-list]") ? "list:changed" : "sandbox:changed");
  };
  const release = () => {
    if (isHeld()) return;
    const waiting = [...held.waiting];
    held.waiting.clear();
    waiting.forEach(refreshNamed);
  };
  // After the click itself, which comes right behind the release.
  const released = () => { held.pressed = false; setTimeout(release); };
  document.addEventListener("pointerdown", () => { held.pressed = true; }, true);
  for (const name of ["pointerup", "pointercancel", "dragend", "contextmenu"]) document.addEventListener(name, released, true);
  window.addEventListener("blur", released);
  // The dialog is shut a moment before it says so, and only then is the answer acted on.
  $("#confirm").addEventListener("close", () => setTimeout(() => { held.asking = false; release(); }));
  // A fetch that was on its way when the finger came down.
  document.addEventListener("htmx:beforeSwap", (event) => {
    const { elt, triggeringEvent } = event.detail.requestConfig;
    if (!isHeld() || !["sandbox:changed", "list:changed"].includes(triggeringEvent?.type)) return;
    event.detail.shouldSwap = false;
    held.waiting.add(nameOf(elt));
  });
  document.addEventListener("htmx:beforeSend", (event) => {
    const { elt, xhr } = event.detail;
    if (!isLive(elt)) return;
    const name = nameOf(elt);
    const fetch = { again: false };
    fetches.set(name, fetch);
    xhr.addEventListener("readystatechange", () => {
      // Something else took its place meanwhile, which the answer does not reach.
      if (xhr.readyState === XMLHttpRequest.DONE && !elt.isConnected) fetch.again = true;
    });
    xhr.addEventListener("loadend", () => {
      if (fetches.get(name) === fetch) fetches.delete(name);
      // Its answer may have been that it is gone.
      if (fetch.again || !$(name)) refreshNamed(name);
    });
  });
  const showLive = (on) => {
    for (const element of $$("[data-as-of]")) {
      element.dataset.on = String(on);
      element.textContent = on ? "Live" : `As of ${live.asOf.toLocaleTimeString()}`;
      element.title = on ? "Changes show at once" : "The live connection is down; the page asks every 10 seconds";
    }
  };
  const refreshAll = () => {
    if (document.hidden) return;
    const whole = $("[data-live-list]");
    (whole ? [whole] : $$("[data-live]")).forEach(refresh);
  };
  const changed = (id) => {
    if (live.pending.has(id)) return;
    // Changes often come in twos and threes: one fetch answers them all.
    live.pending.set(id, setTimeout(() => {
      live.pending.delete(id);
      refreshNamed(`[data-live="${CSS.escape(id)}"]`);
    }, 150));
  };
  const connect = () => {
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    const socket = new WebSocket(`${scheme}://${location.host}/ws/teams/${team}/live`);
    live.socket = socket;
    socket.onmessage = (event) => {
      const message = JSON.parse(event.data);
      if (message.type === "ready") {
        clearInterval(live.poll);
        live.poll = null;
        const again = live.tries > 0;
        live.tries = 0;
        showLive(true);
        if (again) refreshAll();
      } else changed(message.sandbox_id);
    };
    socket.onclose = (event) => {
      showLive(false);
      if (event.code === 4404) return;
      live.tries += 1;
      live.poll ??= setInterval(refreshAll, POLL_MS);
      setTimeout(connect, Math.min(30000, 500 * 2 ** live.tries));
    };
  };
  document.addEventListener("htmx:afterRequest", (event) => {
    if (event.detail.successful) { live.asOf = new Date(); if (live.socket?.readyState !== WebSocket.OPEN) showLive(false); }
  });
  document.addEventListener("htmx:afterSettle", () => showLive(live.socket?.readyState === WebSocket.OPEN));
  document.addEventListener("visibilitychange", () => { if (!document.hidden && live.poll) refreshAll(); });
  if (team && $("[data-live], [data-live-list]")) connect();

  window.Sandkeep = { toast, confirmed, writeTimes, span: longSpan };
  writeTimes();
  tick();
})();
