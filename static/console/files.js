// The Files tab: new, rename, delete, and uploads with progress that can be cancelled.
(() => {
  "use strict";
  const root = document.getElementById("files");
  const { toast, confirmed } = window.Sandkeep;
  const csrf = JSON.parse(document.body.getAttribute("hx-headers"));
  const here = () => root.querySelector("[data-path]").dataset.path;
  const join = (directory, name) => `${directory.replace(/\/$/, "")}/${name}`;
  const address = (base, path, extra = "") => `${base}?path=${encodeURIComponent(path)}${extra}`;
  const listing = document.getElementById("listing");
  const listUrl = listing.getAttribute("hx-get").split("?")[0];
  const reload = () => window.htmx.ajax("GET", address(listUrl, here()), { target: "#listing", swap: "innerHTML" });

  const ask = ({ title, label, value, action }) => new Promise((resolve) => {
    const dialog = document.getElementById("ask");
    const field = document.getElementById("ask-value");
    document.getElementById("ask-title").textContent = title;
    document.getElementById("ask-label").textContent = label;
    document.getElementById("ask-yes").textContent = action;
    field.value = value;
    dialog.returnValue = "no";
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes" ? field.value : null), { once: true });
    dialog.showModal();
    field.focus();
    field.setSelectionRange(value.lastIndexOf("/") + 1, value.length);
  });
  // Enter in the field is "yes", though "Cancel" comes first.
  document.getElementById("ask-value").addEventListener("keydown", (event) => {
    if (event.key === "Enter") { event.preventDefault(); document.getElementById("ask").close("yes"); }
  });

  async function post(url, body) {
    try {
      const response = await fetch(url, { method: "POST", headers: csrf, body });
      if (response.ok) return true;
      const plain = response.headers.get("Content-Type")?.startsWith("text/plain");
      toast(plain ? await response.text() : `That did not work (${response.status}).`, { bad: true });
    } catch { toast("The console does not answer. Nothing was changed.", { bad: true }); }
    return false;
  }

  root.addEventListener("click", async (event) => {
    const at = (selector) => event.target.closest(selector);
    const row = at("[data-entry]");
    if (at("[data-upload]")) document.getElementById("upload-input").click();
    else if (at("[data-new]")) {
      const kind = at("[data-new]").dataset.new;
      const name = await ask({ title: `New ${kind}`, label: `Name, in ${here()}`, value: "", action: "Make it" });
      if (!name) return;
      const path = name.startsWith("/") ? name : join(here(), name);
      const isDirectory = kind === "directory";
      const url = isDirectory ? address(root.dataset.mkdir, path) : address(root.dataset.write, path, "&new=1");
      if (await post(url, isDirectory ? undefined : new Blob([], { type: "application/octet-stream" }))) reload();
    } else if (at("[data-move]") && row) {
      const to = await ask({ title: `Rename or move ${row.dataset.name}`, label: "Its new path", value: row.dataset.entry, action: "Move it" });
      if (!to || to === row.dataset.entry) return;
      const target = to.startsWith("/") ? to : join(here(), to);
      if (await post(address(root.dataset.move, row.dataset.entry), new URLSearchParams({ to: target }))) { toast("Moved."); reload(); }
    } else if (at("[data-remove]") && row) {
      const isDirectory = at("[data-remove]").dataset.kind === "dir";
      const yes = await confirmed({ title: `Delete ${row.dataset.name}?`, text: isDirectory ? "All that is in it goes too, for good." : "It is gone for good.", action: "Delete it", danger: true });
      if (yes && await post(address(root.dataset.delete, row.dataset.entry))) { toast(`${row.dataset.name} is deleted.`); reload(); }
    }
  });

  // -- uploads: one after the other, each with its progress --------------------------------------
  const waiting = [];
  let isBusy = false;
  async function enqueue(fileList) {
    const directory = here();
    for (const file of fileList) {
      if (root.querySelector(`[data-name="${CSS.escape(file.name)}"]`) && !await confirmed({ title: `Replace ${file.name}?`, text: "There is a file of this name. Its content is lost.", action: "Replace it", danger: true })) continue;
      const line = document.createElement("div");
      line.className = "upload";
      line.setAttribute("role", "status");
      const name = document.createElement("span");
      name.textContent = file.name;
      const state = document.createElement("span");
      state.className = "num text-secondary";
      state.textContent = "waits";
      const cancel = document.createElement("button");
      cancel.type = "button";
      cancel.className = "btn btn-quiet";
      cancel.textContent = "Cancel";
      const meter = document.createElement("progress");
      meter.className = "meter";
      meter.max = Math.max(1, file.size);
      meter.value = 0;
      meter.setAttribute("aria-label", `Upload of ${file.name}`);
      line.append(name, state, cancel, meter);
      document.getElementById("uploads").append(line);
      const job = { file, path: join(directory, file.name), line, state, meter, request: null };
      cancel.onclick = () => {
        job.request?.abort();
        const at = waiting.indexOf(job);
        if (at >= 0) waiting.splice(at, 1);
        line.remove();
      };
      waiting.push(job);
    }
    next();
  }
  function next() {
    if (isBusy || !waiting.length) return;
    isBusy = true;
    const job = waiting.shift();
    const request = new XMLHttpRequest();
    job.request = request;
    request.open("POST", address(root.dataset.write, job.path));
    for (const [header, value] of Object.entries(csrf)) request.setRequestHeader(header, value);
    request.setRequestHeader("Content-Type", "application/octet-stream");
    request.upload.onprogress = (event) => {
      job.meter.value = event.loaded;
      job.state.textContent = event.loaded < event.total ? `${Math.floor(100 * event.loaded / Math.max(1, event.total))} %` : "being written";
    };
    const done = (text) => {
      isBusy = false;
      if (text) { job.state.textContent = text; job.line.classList.add("text-danger"); job.line.querySelector("button").textContent = "Dismiss"; toast(`${job.file.name}: ${text}`, { bad: true }); }
      else job.line.remove();
      if (waiting.length) next(); else reload();
    };
    request.onload = () => done(request.status < 300 ? "" : request.getResponseHeader("Content-Type")?.startsWith("text/plain") ? request.responseText : request.status === 413 ? "It is too large." : `It failed (${request.status}).`);
    request.onerror = () => done("The console does not answer.");
    request.onabort = () => done("");
    request.send(job.file);
  }
  root.addEventListener("change", (event) => { if (event.target.id === "upload-input") { enqueue([...event.target.files]); event.target.value = ""; } });
  for (const kind of ["dragenter", "dragover"]) root.addEventListener(kind, (event) => { if ([...event.dataTransfer.types].includes("Files")) { event.preventDefault(); root.classList.add("dropping"); } });
  for (const kind of ["dragleave", "drop"]) root.addEventListener(kind, (event) => { if (kind === "drop" || !root.contains(event.relatedTarget)) root.classList.remove("dropping"); });
  root.addEventListener("drop", (event) => { event.preventDefault(); if (root.querySelector("[data-upload]")) enqueue([...event.dataTransfer.files]); });
  window.addEventListener("beforeunload", (event) => { if (isBusy) event.preventDefault(); });

  // When the sandbox wakes or falls asleep, its files are to be had another way.
  let state = document.getElementById("head").dataset.state;
  document.addEventListener("htmx:afterSwap", () => {
    const now = document.getElementById("head")?.dataset.state;
    if (!now || now === state) return;
    state = now;
    if (["running", "paused"].includes(now) && root.querySelector("[data-path]")) reload();
  });
})();
