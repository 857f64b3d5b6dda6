// The editor of one text file: CodeMirror over a textarea, saved with Ctrl+S.
(() => {
  "use strict";
  const area = document.getElementById("editor");
  const save = document.getElementById("save");
  // HTML knows no \r\n, so the page says apart which the file has.
  const lineEnd = area.dataset.lineEnds === "crlf" ? "\r\n" : "\n";
  const editor = CodeMirror.fromTextArea(area, {
    mode: area.dataset.mode || null,
    lineNumbers: true,
    lineWrapping: false,
    matchBrackets: true,
    indentUnit: 4,
    readOnly: area.readOnly,
    inputStyle: "contenteditable",
    screenReaderLabel: area.getAttribute("aria-label"),
    // Tab indents; after Escape it moves on, so that the keyboard is not caught here.
    extraKeys: {
      "Ctrl-S": () => write(),
      "Cmd-S": () => write(),
      Esc: (cm) => cm.getInputField().blur(),
    },
  });
  let clean = editor.changeGeneration();
  const dirty = () => !editor.isClean(clean);
  editor.on("change", () => { if (save) save.disabled = !dirty(); });
  window.addEventListener("beforeunload", (event) => { if (dirty()) event.preventDefault(); });

  async function write() {
    if (!save || !dirty()) return;
    save.disabled = true;
    const generation = editor.changeGeneration();
    const headers = JSON.parse(document.body.getAttribute("hx-headers"));
    const url = `${area.dataset.write}&was=${encodeURIComponent(area.dataset.version)}`;
    try {
      const response = await fetch(url, { method: "POST", headers: { ...headers, "Content-Type": "application/octet-stream" }, body: editor.getValue(lineEnd) });
      const text = await response.text();
      if (!response.ok) throw new Error(response.headers.get("Content-Type")?.startsWith("text/plain") ? text : `It was not saved (${response.status}).`);
      area.dataset.version = text;
      clean = generation;
      window.Sandkeep.toast("Saved.");
    } catch (error) {
      window.Sandkeep.toast(error.message, { bad: true });
    }
    save.disabled = !dirty();
  }
  save?.addEventListener("click", write);
  window.SandkeepEditor = editor;
})();
