// Sets the theme before the page is painted: the reader's choice, else the system's.
(() => {
  "use strict";
  const KEY = "sandkeep-theme";
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  const choice = () => {
    try { return localStorage.getItem(KEY) || "auto"; } catch { return "auto"; }
  };
  const apply = () => {
    const chosen = choice();
    const theme = chosen === "auto" ? (dark.matches ? "dark" : "light") : chosen;
    document.documentElement.setAttribute("data-bs-theme", theme);
    document.documentElement.setAttribute("data-theme-choice", chosen);
    document.dispatchEvent(new CustomEvent("theme:changed", { detail: theme }));
  };

  window.SandkeepTheme = {
    choice,
    choose(theme) {
      try { localStorage.setItem(KEY, theme); } catch { /* Storage is off: this page only. */ }
      apply();
    },
  };
  dark.addEventListener("change", apply);
  apply();
})();
