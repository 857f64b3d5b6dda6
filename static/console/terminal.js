// The terminal: xterm.js over a WebSocket to a shell in the guest. See sandboxes/consumers.py
// for the frames. The shell lives in the guest, so every connection is only a view of it.
(() => {
  "use strict";
  const root = document.getElementById("terminal");
  if (!root) return;
  const id = (name) => document.getElementById(name);
  const SANDBOX = root.dataset.sandbox;
  const [SHELL_ENDED, ASLEEP, FAILED, SIGNED_OUT, NOT_ALLOWED, NOT_FOUND] = [4000, 4001, 4002, 4401, 4403, 4404];
  const FINAL = new Set([SHELL_ENDED, ASLEEP, FAILED, SIGNED_OUT, NOT_ALLOWED, NOT_FOUND, 4400]);
  const WAKING = { starting: "Starting…", resuming: "Waking up…", pausing: "Falling asleep…" };
  const CHUNK_BYTES = 16 * 1024;
  const ACK_BYTES = 64 * 1024;
  const PASTE_LINES = 8;
  const SCROLLBACK = 10000;
  // What xterm.js answers by itself to a program's questions. In a replay the question was
  // answered long ago; a second answer would end up as typed text.
  const REPLY = /^(\x1b\[[?>=]?[\d;]*[cnRtyu]|\x1b\][\d;]+[^\x07]*(\x07|\x1b\\)|\x1bP[^\x1b]*\x1b\\|\x1b\[[IO])+$/;

  const store = {
    get(key, fallback) { try { return JSON.parse(localStorage.getItem(key)) ?? fallback; } catch { return fallback; } },
    set(key, value) { try { localStorage.setItem(key, JSON.stringify(value)); } catch { /* Not remembered, then. */ } },
  };
  const TABS_KEY = `sandkeep-shells-${SANDBOX}`;
  let fontSize = store.get("sandkeep-font-size", 13);
  let names = store.get(TABS_KEY, ["1"]).filter((name) => /^[a-z0-9]{1,16}$/.test(name));
  if (!names.length) names = ["1"];
  const shells = new Map();
  let current = null;
  let pasteQuietly = false;
  const encoder = new TextEncoder();

  const THEME = { background: "#151312", foreground: "#e9e3de", cursor: "#f0a56f", selectionBackground: "#6b4a33", black: "#2b2725", brightBlack: "#8a817a", red: "#ff8080", green: "#7fd6a2", yellow: "#f0bf5a", blue: "#8fb4ff", magenta: "#d7a6ff", cyan: "#79d3d8", white: "#d9d2cc", brightRed: "#ffa3a3", brightGreen: "#a4e8bf", brightYellow: "#ffd98a", brightBlue: "#b3ceff", brightMagenta: "#e6c8ff", brightCyan: "#a6e6ea", brightWhite: "#ffffff" };

  class Shell {
    constructor(name) {
      this.name = name;
      this.socket = null;
      this.attached = false;
      this.tries = 0;
      this.queue = [];          // what was typed and is not sent, in order
      this.onWay = 0;           // sent, and not yet taken by the shell
      this.window = 256 * 1024;
      this.replay = 0;          // bytes of the replay that are still to come
      this.replaying = false;
      this.unacked = 0;
      this.cover = null;
      this.banner = null;
      this.retry = null;
      this.screen = document.createElement("div");
      this.screen.className = "term-screen";
      this.screen.hidden = true;
      this.screen.id = `screen-${name}`;
      this.screen.setAttribute("role", "tabpanel");
      this.screen.setAttribute("aria-label", `Shell ${name}`);
      id("screens").prepend(this.screen);
      this.term = new Terminal({ allowProposedApi: true, fontFamily: getComputedStyle(document.documentElement).getPropertyValue("--tblr-font-monospace") || "monospace", fontSize, scrollback: SCROLLBACK, theme: THEME, cursorBlink: true, macOptionIsMeta: true, rightClickSelectsWord: true, minimumContrastRatio: 4.5 });
      this.fit = new FitAddon.FitAddon();
      this.search = new SearchAddon.SearchAddon();
      this.term.loadAddon(this.fit);
      this.term.loadAddon(this.search);
      this.term.loadAddon(new WebLinksAddon.WebLinksAddon((event, uri) => { window.open(uri, "_blank", "noopener,noreferrer"); }));
      this.term.loadAddon(new Unicode11Addon.Unicode11Addon());
      this.term.unicode.activeVersion = "11";
      this.term.open(this.screen);
      this.term.onData((text) => this.typed(text));
      this.term.onBinary((text) => this.send(Uint8Array.from(text, (c) => c.charCodeAt(0))));
      this.term.onResize(() => this.resized());
      this.term.onSelectionChange(() => this.copySelection());
      this.term.attachCustomKeyEventHandler((event) => this.shortcut(event));
      this.screen.addEventListener("paste", (event) => this.pasted(event), { capture: true });
    }

    // -- input ------------------------------------------------------------------------------
    typed(text) {
      if (this.replaying && REPLY.test(text)) return;
      if (!this.attached && this.cover?.act && text === "\r") { this.cover.act(); return; }
      this.send(encoder.encode(text));
    }
    send(bytes) {
      for (let at = 0; at < bytes.length; at += CHUNK_BYTES) this.queue.push(bytes.subarray(at, at + CHUNK_BYTES));
      this.flush();
    }
    // Sends in order, and never more than the window beyond what the shell has taken.
    flush() {
      while (this.attached && this.queue.length && this.onWay < this.window) {
        const chunk = this.queue.shift();
        this.onWay += chunk.length;
        this.socket.send(chunk);
      }
    }
    pasted(event) {
      const text = event.clipboardData?.getData("text/plain") ?? "";
      const lines = text.split(/\r\n|\r|\n/).length;
      if (!text || lines < PASTE_LINES || pasteQuietly) return;
      event.preventDefault();
      event.stopPropagation();
      const dialog = id("paste");
      id("paste-title").textContent = `Paste ${lines.toLocaleString()} lines?`;
      id("paste-text").textContent = text.length > 600 ? `${text.slice(0, 600)}…` : text;
      dialog.returnValue = "no";
      dialog.addEventListener("close", () => {
        if (dialog.returnValue === "yes") { pasteQuietly = id("paste-quiet").checked; this.term.paste(text); }
        this.term.focus();
      }, { once: true });
      dialog.showModal();
    }
    copySelection() {
      const text = this.term.getSelection();
      if (text && navigator.clipboard) navigator.clipboard.writeText(text).catch(() => {});
    }
    shortcut(event) {
      if (event.type !== "keydown" || !event.ctrlKey || !event.shiftKey) return true;
      if (event.code === "KeyF") { event.preventDefault(); openFind(); return false; }
      if (event.code === "KeyC") { event.preventDefault(); this.copySelection(); return false; }
      if (event.code === "KeyV") return false; // the browser pastes, and `pasted` sees it
      return true;
    }
    resized() {
      clearTimeout(this.resizing);
      this.resizing = setTimeout(() => this.say({ type: "resize", rows: this.term.rows, cols: this.term.cols }), 60);
    }

    // -- the connection -------------------------------------------------------------------------
    connect({ wake = false } = {}) {
      clearTimeout(this.retry);
      this.show({ banner: null });
      const scheme = location.protocol === "https:" ? "wss" : "ws";
      const asked = new URLSearchParams({ shell: this.name, rows: this.term.rows, cols: this.term.cols });
      if (wake) asked.set("wake", "1");
      const socket = new WebSocket(`${scheme}://${location.host}/ws/sandboxes/${SANDBOX}/terminal?${asked}`);
      socket.binaryType = "arraybuffer";
      this.socket = socket;
      if (!this.banner && !this.replayed) this.show({ cover: { title: "Connecting…", text: "" } });
      socket.onmessage = (event) => {
        if (this.socket !== socket) return;
        if (typeof event.data === "string") this.hear(JSON.parse(event.data));
        else this.write(new Uint8Array(event.data));
      };
      socket.onclose = (event) => { if (this.socket === socket) this.closed(event.code); };
    }
    say(message) { if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message)); }
    write(bytes) {
      const length = bytes.length;
      if (this.replaying) {
        this.replay -= length;
        if (this.replay <= 0) { this.term.write(bytes, () => { this.replaying = false; this.written(length); }); return; }
      }
      this.term.write(bytes, () => this.written(length));
    }
    written(length) {
      this.unacked += length;
      if (this.unacked >= ACK_BYTES) { this.say({ type: "ack", bytes: this.unacked }); this.unacked = 0; }
    }
    hear(message) {
      switch (message.type) {
        case "attached":
          this.term.reset();
          this.replayed = true;
          this.tries = 0;
          this.unacked = 0;
          this.onWay = 0;
          this.replay = message.replay_bytes;
          this.replaying = this.replay > 0;
          this.attached = true;
          this.show({ cover: null, banner: null });
          this.say({ type: "resize", rows: this.term.rows, cols: this.term.cols });
          this.flush();
          if (this === current) this.term.focus();
          root.dataset.attached = this.name;
          break;
        case "taken": this.onWay = Math.max(0, this.onWay - message.bytes); this.flush(); break;
        case "status": this.state = message.state; this.window = message.window_bytes; this.price = message.price_per_hour; break;
        case "waking": this.show({ cover: { title: WAKING[this.state] ?? "Reaching its shell…", text: ["starting", "resuming"].includes(this.state) ? `Once it runs it costs ${this.price || root.dataset.price} an hour.` : "", steps: message.steps } }); break;
        case "notice": this.term.write(`\r\n\x1b[33m[${message.text}]\x1b[0m\r\n`); break;
        case "failed": this.failure = message.text; break;
        case "exit": this.exitCode = message.exit_code; break;
      }
    }
    closed(code) {
      this.attached = false;
      this.onWay = 0;
      delete root.dataset.attached;
      const wake = { label: `Wake it · ${this.price || root.dataset.price}/h`, run: () => this.connect({ wake: true }) };
      switch (code) {
        case SHELL_ENDED:
          this.queue = [];
          this.show({ cover: { title: "The shell has ended", text: this.exitCode ? `With code ${this.exitCode}.` : "", label: "New shell", act: () => this.connect() } });
          return;
        case ASLEEP:
          this.queue = [];
          this.show({ cover: { asleep: true, title: this.state === "pausing" ? "This sandbox is falling asleep" : "This sandbox is asleep", text: `Its files are safe, and it costs nothing in compute. Awake, it costs ${this.price || root.dataset.price} an hour; the programs of a new run start afresh.`, label: wake.label, act: wake.run } });
          return;
        case FAILED: this.show({ cover: { title: "No terminal", text: this.failure, label: "Try again", act: () => this.connect({ wake: true }) } }); return;
        case SIGNED_OUT: this.show({ cover: { title: "You are signed out here", text: "Your session or your place in the team has ended.", label: "Sign in", act: () => location.reload() } }); return;
        case NOT_ALLOWED: this.show({ cover: { title: "Your role may look, but not type", text: "An admin of the team can change that." } }); return;
        case NOT_FOUND: this.show({ cover: { title: "There is no such sandbox", text: "It may have been deleted." } }); return;
      }
      this.tries += 1;
      this.countDown(Math.min(30, 2 ** Math.min(this.tries - 1, 5)));
    }
    countDown(seconds) {
      if (seconds <= 0) { this.connect(); return; }
      this.show({ banner: { text: `Connection lost; the shell goes on. Again in ${seconds} s.`, act: () => this.connect() } });
      clearTimeout(this.retry);
      this.retry = setTimeout(() => this.countDown(seconds - 1), 1000);
    }
    show(parts) { Object.assign(this, parts); if (this === current) draw(); }

    // -- the tab ----------------------------------------------------------------------------------
    layout() { if (!this.screen.hidden && this.screen.clientWidth) { try { this.fit.fit(); } catch { /* Not laid out yet. */ } } }
    close() {
      this.say({ type: "end" });
      const { socket } = this;
      this.socket = null;
      clearTimeout(this.retry);
      // Leaves the frame above a moment to arrive.
      setTimeout(() => socket?.close(), 1500);
      this.term.dispose();
      this.screen.remove();
    }
  }

  // -- what covers the current shell ------------------------------------------------------------
  function draw() {
    const { cover, banner } = current;
    id("cover").hidden = !cover;
    if (cover) {
      id("cover-title").textContent = cover.title;
      id("cover-text").textContent = cover.text || "";
      const steps = id("cover-steps");
      steps.hidden = !cover.steps;
      steps.replaceChildren(...(cover.steps || []).map((step) => {
        const line = document.createElement("li");
        const mark = { done: "✓", now: "…", next: "·" }[step.progress];
        line.textContent = `${mark} ${step.label}`;
        if (step.progress !== "next") {
          const time = document.createElement("span");
          time.className = "t";
          time.textContent = `${step.at_s.toFixed(1)} s`;
          line.append(time);
        }
        return line;
      }));
      const act = id("cover-act");
      act.hidden = !cover.act;
      if (cover.act) { act.textContent = cover.label; act.onclick = cover.act; }
    }
    id("banner").hidden = !banner;
    if (banner) { id("banner-text").textContent = banner.text; id("banner-now").onclick = banner.act; }
  }

  function drawTabs() {
    id("shells").replaceChildren(...names.map((name) => {
      const tab = document.createElement("span");
      tab.className = "term-tab";
      tab.setAttribute("role", "presentation");
      const pick = document.createElement("button");
      pick.type = "button";
      pick.setAttribute("role", "tab");
      pick.setAttribute("aria-selected", String(current?.name === name));
      pick.setAttribute("aria-controls", `screen-${name}`);
      pick.tabIndex = current?.name === name ? 0 : -1;
      pick.textContent = `Shell ${name}`;
      pick.onclick = () => choose(name);
      pick.onkeydown = (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!step) return;
        choose(names[(names.indexOf(name) + step + names.length) % names.length], { focus: false });
        id("shells").querySelector('[aria-selected="true"]').focus();
      };
      tab.append(pick);
      return tab;
    }));
    if (names.length > 1) {
      const close = document.createElement("button");
      close.type = "button";
      close.setAttribute("aria-label", `Close shell ${current.name}`);
      close.title = "Close this shell and end what runs in it";
      close.textContent = "×";
      close.onclick = () => closeShell(current.name);
      id("shell-close")?.remove();
      close.id = "shell-close";
      id("shells").after(close);
    } else id("shell-close")?.remove();
  }
  function choose(name, { focus = true } = {}) {
    for (const shell of shells.values()) shell.screen.hidden = shell.name !== name;
    let shell = shells.get(name);
    if (!shell) {
      shell = new Shell(name);
      shells.set(name, shell);
      shell.screen.hidden = false;
      shell.layout();
      shell.connect();
    }
    current = shell;
    drawTabs();
    draw();
    shell.layout();
    if (focus) shell.term.focus();
  }
  function closeShell(name) {
    shells.get(name)?.close();
    shells.delete(name);
    names = names.filter((other) => other !== name);
    store.set(TABS_KEY, names);
    choose(names.at(-1));
  }

  // -- the bar --------------------------------------------------------------------------------------
  id("shell-add").onclick = () => {
    let number = 1;
    while (names.includes(String(number))) number += 1;
    names.push(String(number));
    store.set(TABS_KEY, names);
    choose(String(number));
  };
  const resizeFont = (by) => {
    fontSize = Math.min(28, Math.max(8, fontSize + by));
    store.set("sandkeep-font-size", fontSize);
    for (const shell of shells.values()) { shell.term.options.fontSize = fontSize; shell.layout(); }
  };
  id("font-smaller").onclick = () => resizeFont(-1);
  id("font-larger").onclick = () => resizeFont(1);
  id("term-full").onclick = (event) => {
    const full = root.classList.toggle("full");
    event.currentTarget.setAttribute("aria-pressed", String(full));
    current.layout();
    current.term.focus();
  };
  const openFind = () => { id("find").hidden = false; id("find-text").focus(); id("find-text").select(); current.layout(); };
  const closeFind = () => { id("find").hidden = true; current.search.clearDecorations(); current.layout(); current.term.focus(); };
  id("term-search").onclick = () => (id("find").hidden ? openFind() : closeFind());
  id("find-close").onclick = closeFind;
  id("find").onsubmit = (event) => { event.preventDefault(); current.search.findNext(id("find-text").value); };
  id("find-before").onclick = () => current.search.findPrevious(id("find-text").value);
  id("find").onkeydown = (event) => { if (event.key === "Escape") closeFind(); };
  id("find-text").oninput = () => current.search.findNext(id("find-text").value, { incremental: true });
  root.addEventListener("keydown", (event) => { if (event.key === "Escape" && event.shiftKey && root.classList.contains("full")) id("term-full").click(); });

  // A resume elsewhere on the page, or by somebody else, brings the shell back by itself.
  document.addEventListener("htmx:afterSwap", () => {
    const state = document.getElementById("head")?.dataset.state;
    if (!state || state === root.dataset.state) return;
    root.dataset.state = state;
    if (["starting", "resuming", "running"].includes(state) && current && current.socket?.readyState === WebSocket.CLOSED && current.cover?.asleep) current.connect();
  });
  new ResizeObserver(() => current?.layout()).observe(id("screens"));
  choose(names[0]);
  window.SandkeepTerminal = { text: () => { const buffer = current.term.buffer.active; return Array.from({ length: buffer.length }, (_, y) => buffer.getLine(y)?.translateToString(true) ?? "").join("\n"); }, paste: (text) => current.term.paste(text), size: () => [current.term.rows, current.term.cols] };
})();
