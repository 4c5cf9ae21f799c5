/* The curves: drawn by plotly when they come into view, each with its numbers as a table and a file. */

/** The library is loaded from within the page, once a curve comes into view. */
function plotly() {
  state.plotly = state.plotly || unpacked($("#plotly").textContent).then((code) => new Promise((resolve, reject) => {
    const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
    const script = el("script", { src: url });
    script.onload = () => { URL.revokeObjectURL(url); resolve(window.Plotly); };
    script.onerror = () => reject(new Error("the plotting library could not be loaded"));
    document.head.append(script);
  }));
  return state.plotly;
}

function variable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function themed(figure, axis) {
  const over = axis === "step" ? "step" : $("#axis").selectedOptions[0].text;
  const line = {
    gridcolor: variable("--line"), zerolinecolor: variable("--line"), linecolor: variable("--line"), automargin: true,
    exponentformat: "e", minexponent: 4, separatethousands: true,
  };
  const x = figure.layout.xaxis.title.text === "step" ? { ...figure.layout.xaxis, title: { text: over } } : figure.layout.xaxis;
  return {
    ...figure.layout,
    font: { color: variable("--fg"), family: getComputedStyle(document.body).fontFamily, size: 12 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    xaxis: { ...x, ...line, minexponent: 7 },
    yaxis: { ...figure.layout.yaxis, ...line },
    hoverlabel: { bgcolor: variable("--card"), bordercolor: variable("--line"), font: { color: variable("--fg") }, namelength: -1 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: variable("--muted"), activecolor: variable("--accent") },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } },
    margin: { l: 60, r: 12, t: 8, b: 44 },
  };
}

/** A name of a trace that leaves room for its numbers; names of runs differ at their ends. Entities stay whole. */
function fitting(name) {
  const letters = name?.match(/&#?\w+;|./gsu) ?? [];
  const most = innerWidth < 600 ? 20 : 44;
  return letters.length > most ? `\u2026${letters.slice(1 - most).join("")}` : name;
}

/** The traces with steps replaced by what the reader compares over. */
function over(traces, axis) {
  if (axis === "step") return traces;
  return traces.map((trace) => {
    const positions = trace.meta ? state.data.axes[trace.meta.run] : null;
    if (!positions) return trace;
    const at = new Map(positions.step.map((step, i) => [step, positions[axis][i]]));
    return { ...trace, x: trace.x.map((step) => (step === 0 ? 0 : at.has(step) ? at.get(step) : null)) };
  });
}

async function draw(chart, figure) {
  const library = await plotly();
  if (!figure.isConnected) return;
  const axis = $("#axis").value;
  const plot = $(".plot", figure);
  const traces = over(chart.figure.data, axis).map((trace) => ({ ...trace, name: fitting(trace.name) }));
  await library.react(plot, traces, themed(chart.figure, axis), {
    responsive: true, displaylogo: false, plotlyServerURL: "", // Nothing of a run may be sent anywhere.
    modeBarButtonsToRemove: ["sendChartToCloud", "select2d", "lasso2d", "autoScale2d"],
  });
  plot.dataset.ready = "1";
  state.drawn.set(chart.id, [chart, figure]);
}

function redrawAll() {
  for (const [chart, figure] of state.drawn.values()) draw(chart, figure);
}

const inView = "IntersectionObserver" in window
  ? new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        inView.unobserve(entry.target);
        show(entry.target);
      }
    }, { rootMargin: "300px" })
  : null;

function show(figure) {
  const chart = state.data.charts.find((each) => each.id === figure.id.slice("chart-".length));
  if (chart) draw(chart, figure).catch((error) => { $(".plot", figure).textContent = String(error.message || error); });
}

function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number" || Number.isInteger(value)) return String(value);
  return String(Number(value.toPrecision(6)));
}

function table(chart) {
  const head = el("tr", {}, ...chart.columns.map((name) => el("th", { scope: "col" }, name)));
  const rows = chart.rows.map((row) => el("tr", {}, ...row.map((value) => el("td", {}, cell(value)))));
  const caption = el("caption", { class: "unseen" }, `Numbers of ${chart.title}`);
  return el("table", {}, caption, el("thead", {}, head), el("tbody", {}, ...rows));
}

function quoted(value) {
  const text = value === null || value === undefined ? "" : String(value);
  const safe = /^[=+\-@\t\r]/.test(text) && typeof value !== "number" ? `'${text}` : text; // no formula for a spreadsheet
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

function save(chart) {
  const lines = [chart.columns, ...chart.rows].map((row) => row.map(quoted).join(","));
  const url = URL.createObjectURL(new Blob([lines.join("\r\n") + "\r\n"], { type: "text/csv" }));
  const link = el("a", { href: url, download: `${chart.id}.csv` });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** The runs that all charts share a legend of; none where every chart has its own. */
const shared = () => (state.data.legend?.length > 2 ? state.data.legend : []);

/** What is written under a chart's title. With a shared legend the runs are too many to be written out again at every chart. */
const noteOf = (chart) => [chart.note, !shared().length && chart.summary].filter(Boolean).join(" ");

const spoken = (chart) => `${chart.title}. ${chart.summary}`;

/** The frame of a chart; its curve and its table are made when they are looked at. */
function frame(chart) {
  const figure = el("figure", { id: `chart-${chart.id}` });
  const plot = el("div", { class: "plot", role: "group", "aria-label": spoken(chart) });
  const numbers = el("details", {}, el("summary", {}, "Numbers"));
  numbers.append(button("Save as CSV", { "aria-label": `Save as CSV: ${chart.title}` }, () => save(current())));
  numbers.addEventListener("toggle", () => {
    if (numbers.open && !$("table", numbers)) numbers.append(scrolling(`Numbers of ${chart.title}`, table(current())));
  });
  const current = () => state.data.charts.find((each) => each.id === chart.id) || chart;
  figure.append(el("figcaption", {}, chart.title), el("p", {}, noteOf(chart)), plot, numbers);
  return figure;
}

/** A mark of plotly's by its name; a dot for one that is not known here. */
const SHAPES = {
  square: "M2 2H12V12H2Z", diamond: "M7 1L13 7L7 13L1 7Z", cross: "M5 1H9V5H13V9H9V13H5V9H1V5H5Z",
  x: "M3 1L7 5L11 1L13 3L9 7L13 11L11 13L7 9L3 13L1 11L5 7L1 3Z", "triangle-up": "M7 1L13 12H1Z",
  "triangle-down": "M7 13L1 2H13Z",
  circle: "M7 2a5 5 0 1 0 .01 0Z", star: "M7 0L8.6 5H14L9.7 8.2L11.3 13.3L7 10.2L2.7 13.3L4.3 8.2L0 5H5.4Z",
};

function symbol({ color, symbol: name }) {
  const part = (tag, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };
  const svg = part("svg", { viewBox: "0 0 14 14", width: 12, height: 12, "aria-hidden": "true" });
  svg.append(part("path", { d: SHAPES[name] ?? SHAPES.circle, fill: color }));
  return svg;
}

/** The runs and their colours, once for all curves. */
function layLegend() {
  const place = $("#legend");
  place.hidden = !shared().length;
  place.replaceChildren(...shared().map((entry) => el("li", {}, symbol(entry), el("span", {}, entry.name))));
}

function layCharts() {
  layLegend();
  for (const place of document.querySelectorAll("[data-charts]")) {
    const wanted = state.data.charts.filter((chart) => chart.section === place.dataset.charts);
    if (wanted.length && !$("h3", place) && place.dataset.charts !== "Rescored") place.append(el("h3", {}, place.dataset.charts));
    let grid = $(".charts", place);
    if (wanted.length && !grid) place.append((grid = el("div", { class: "charts" })));
    for (const chart of wanted) layChart(grid, chart);
  }
}

function layChart(grid, chart) {
  const before = $(`#chart-${CSS.escape(chart.id)}`, grid);
  if (!before) {
    const figure = frame(chart);
    grid.append(figure);
    if (inView) inView.observe(figure); else show(figure);
    return;
  }
  $("p", before).textContent = noteOf(chart);
  $(".plot", before).setAttribute("aria-label", spoken(chart));
  const shown = $("table", before);
  if (shown) shown.replaceWith(table(chart));
  if (state.drawn.has(chart.id)) draw(chart, before);
}
