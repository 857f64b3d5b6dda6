// The import of an image: how much of it is uploaded, and a warning before it is left.
(() => {
  "use strict";
  let isBusy = false;
  const form = (event) => event.target.closest?.("[data-upload-form]");
  document.addEventListener("htmx:beforeRequest", (event) => { if (form(event)) isBusy = true; });
  // Comes before a redirect, which must not ask.
  document.addEventListener("htmx:beforeOnLoad", (event) => { if (form(event)) isBusy = false; });
  document.addEventListener("htmx:afterRequest", (event) => {
    if (!form(event)) return;
    isBusy = false;
    const meter = form(event).querySelector("progress");
    if (meter) meter.hidden = true;
  });
  document.addEventListener("htmx:xhr:progress", (event) => {
    const meter = form(event)?.querySelector("progress");
    if (!meter || !event.detail.lengthComputable || !isBusy) return;
    meter.hidden = false;
    meter.value = event.detail.loaded / Math.max(1, event.detail.total);
  });
  window.addEventListener("beforeunload", (event) => { if (isBusy) event.preventDefault(); });
})();
