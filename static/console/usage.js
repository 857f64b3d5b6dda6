// Draws the month's cost by day.
(() => {
  "use strict";
  const holder = document.getElementById("chart");
  const source = document.getElementById("chart-data");
  if (!holder || !source) return;
  const { days, costs } = JSON.parse(source.textContent);
  const x = days.map((day) => Date.parse(`${day}T00:00:00Z`) / 1000);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // A canvas knows no light-dark(): a hidden element works the colour out.
  const colour = (value) => { const probe = document.createElement("i"); probe.style.color = value; document.body.append(probe); const found = getComputedStyle(probe).color; probe.remove(); return found; };
  const dollars = (value) => (value === 0 ? "$0" : value < 0.01 ? `$${value.toPrecision(2)}` : `$${value.toFixed(2)}`);
  let plot = null;
  function draw() {
    plot?.destroy();
    const text = colour("var(--tblr-secondary-color)");
    const grid = colour("var(--tblr-border-color)");
    const bar = css("--tblr-primary");
    const font = "12px system-ui, sans-serif";
    plot = new uPlot({
      width: Math.max(260, holder.clientWidth - 16),
      height: 220,
      cursor: { y: false, drag: { x: false, y: false } },
      legend: { live: true },
      tzDate: (ts) => uPlot.tzDate(new Date(ts * 1000), "Etc/UTC"),
      scales: { x: { range: [x[0] - 43200, x.at(-1) + 43200] }, y: { range: (_, __, max) => [0, max > 0 ? max * 1.15 : 1] } },
      axes: [
        { stroke: text, font, grid: { show: false }, ticks: { show: false }, values: (_, splits) => splits.map((ts) => new Date(ts * 1000).getUTCDate()), space: 40 },
        { stroke: text, font, grid: { stroke: grid, width: 1 }, ticks: { show: false }, size: 78, values: (_, splits) => splits.map(dollars) },
      ],
      series: [
        { label: "Day", value: (_, ts) => (ts == null ? "–" : new Date(ts * 1000).toISOString().slice(0, 10)) },
        { label: "Cost", stroke: bar, fill: bar, width: 0, paths: uPlot.paths.bars({ size: [0.7, 40], radius: 0.15 }), points: { show: false }, value: (_, value) => (value == null ? "–" : `$${value.toFixed(6)}`) },
      ],
    }, [x, costs], holder);
  }
  draw();
  let timer;
  new ResizeObserver(() => { clearTimeout(timer); timer = setTimeout(draw, 100); }).observe(holder.parentElement);
  document.addEventListener("theme:changed", draw);
})();
