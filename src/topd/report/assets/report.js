"use strict";
/* The page: decodes its data, draws the curves with plotly when they come into view, and follows a run that is still going on. */

(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const state = { data: null, lens: null, plotly: null, drawn: new Map() };

  /** Make an element; `text` is always text, never markup. */
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== null && value !== undefined) made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  }

  /** Undo base64 and gzip. */
  async function unpacked(text) {
    const bytes = Uint8Array.from(atob(text.trim()), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  /* --- theme --- */

  const THEMES = ["system", "light", "dark"];

  function remembered(key, value) {
    try {
      if (value === undefined) return localStorage.getItem(key);
      localStorage.setItem(key, value);
    } catch (error) { /* a page from disk may not store anything */ }
    return null;
  }

  function setTheme(theme) {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    $("#theme").textContent = `Theme: ${theme}`;
    redrawAll();
  }

  function startTheme() {
    const button = $("#theme");
    let theme = THEMES.includes(remembered("topd-theme")) ? remembered("topd-theme") : "system";
    button.hidden = false;
    button.addEventListener("click", () => {
      theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
      remembered("topd-theme", theme);
      setTheme(theme);
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
    setTheme(theme);
  }

  /* --- curves --- */

  /** The library is loaded from within the page, once a curve comes into view. */
  function plotly() {
    state.plotly = state.plotly || unpacked($("#plotly").textContent).then((code) => new Promise((resolve, reject) => {
      const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
      const script = element("script", { src: url });
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
    const over = { step: "step", updates: "updates", tokens: "tokens trained on", hours: "hours of steps" }[axis];
    const line = { gridcolor: variable("--line"), zerolinecolor: variable("--line"), linecolor: variable("--line"), automargin: true };
    const x = figure.layout.xaxis.title.text === "step" ? { ...figure.layout.xaxis, title: { text: over } } : figure.layout.xaxis;
    return {
      ...figure.layout,
      font: { color: variable("--fg"), family: getComputedStyle(document.body).fontFamily, size: 12 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      xaxis: { ...x, ...line },
      yaxis: { ...figure.layout.yaxis, ...line },
      hoverlabel: { bgcolor: variable("--card"), bordercolor: variable("--line"), font: { color: variable("--fg") }, namelength: -1 },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } },
      margin: { l: 60, r: 12, t: 8, b: 44 },
    };
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
    await library.react(plot, over(chart.figure.data, axis), themed(chart.figure, axis), {
      responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
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
    const head = element("tr", {}, ...chart.columns.map((name) => element("th", { scope: "col" }, name)));
    const rows = chart.rows.map((row) => element("tr", {}, ...row.map((value) => element("td", {}, cell(value)))));
    return element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
  }

  function quoted(value) {
    const text = value === null || value === undefined ? "" : String(value);
    const safe = /^[=+\-@\t\r]/.test(text) && typeof value !== "number" ? `'${text}` : text; // no formula for a spreadsheet
    return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  }

  function save(chart) {
    const lines = [chart.columns, ...chart.rows].map((row) => row.map(quoted).join(","));
    const url = URL.createObjectURL(new Blob([lines.join("\r\n") + "\r\n"], { type: "text/csv" }));
    const link = element("a", { href: url, download: `${chart.id}.csv` });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  /** The frame of a chart; its curve and its table are made when they are looked at. */
  function frame(chart) {
    const figure = element("figure", { id: `chart-${chart.id}` });
    const plot = element("div", { class: "plot", role: "img", "aria-label": `${chart.title}. ${chart.summary}` });
    const numbers = element("details", {}, element("summary", {}, "Numbers"));
    const button = element("button", { type: "button" }, "Save as CSV");
    numbers.append(button);
    numbers.addEventListener("toggle", () => {
      if (numbers.open && !$("table", numbers)) numbers.append(element("div", { class: "scroll", tabindex: "0" }, table(current())));
    });
    const current = () => state.data.charts.find((each) => each.id === chart.id) || chart;
    button.addEventListener("click", () => save(current()));
    const note = element("p", {}, chart.note ? `${chart.note} ` : "", chart.summary);
    figure.append(element("figcaption", {}, chart.title), note, plot, numbers);
    return figure;
  }

  function layCharts() {
    for (const place of document.querySelectorAll("[data-charts]")) {
      const wanted = state.data.charts.filter((chart) => chart.section === place.dataset.charts);
      if (wanted.length && !$("h3", place) && place.dataset.charts !== "Rescored") place.append(element("h3", {}, place.dataset.charts));
      let grid = $(".charts", place);
      if (wanted.length && !grid) place.append((grid = element("div", { class: "charts" })));
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
    $("p", before).textContent = `${chart.note ? `${chart.note} ` : ""}${chart.summary}`;
    const shown = $("table", before);
    if (shown) shown.replaceWith(table(chart));
    if (state.drawn.has(chart.id)) draw(chart, before);
  }

  /* --- following a run --- */

  async function follow(seconds) {
    let known = document.documentElement.dataset.state || null;
    for (;;) {
      await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
      if (document.hidden) continue;
      try {
        const now = await (await fetch("state", { cache: "no-store" })).text();
        if (now !== known) {
          await refresh(await (await fetch("./", { cache: "no-store" })).text());
          known = now;
        }
        live(`Live: this page follows the run. Last looked ${new Date().toLocaleTimeString()}.`);
      } catch (error) {
        live("The server of this page does not answer. Is `topd report --watch` still running?");
      }
    }
  }

  function live(words) {
    const place = $("#live");
    if (place.textContent !== words) place.textContent = words;
  }

  /** Take over a newer page: its texts are replaced, curves and tokens are updated in place. */
  async function refresh(source) {
    const page = new DOMParser().parseFromString(source, "text/html");
    const data = JSON.parse(await unpacked($("#data", page).textContent));
    for (const section of document.querySelectorAll("[data-live]")) {
      const newer = $(`[data-live="${section.dataset.live}"]`, page);
      const open = [...section.querySelectorAll("details")].map((each) => each.open);
      if (!newer || newer.innerHTML === section.dataset.source) continue;
      section.replaceChildren(...document.importNode(newer, true).childNodes);
      section.hidden = newer.hidden;
      section.querySelectorAll("details").forEach((each, i) => { if (i < open.length) each.open = open[i]; });
      section.dataset.source = newer.innerHTML;
    }
    document.title = page.title;
    state.data = data;
    layCharts();
    state.lens.update(data.lens);
  }

  async function start() {
    startTheme();
    state.data = JSON.parse(await unpacked($("#data").textContent));
    state.lens = window.TopdLens.mount($("#lens"), state.data.lens);
    $("#curve-controls").hidden = false;
    $("#axis").addEventListener("change", redrawAll);
    layCharts();
    document.documentElement.dataset.ready = "1";
    const seconds = Number(document.documentElement.dataset.watch);
    if (seconds) follow(seconds);
  }

  start().catch((error) => { live(`This page could not be shown: ${error.message || error}. It needs a browser of 2023 or newer.`); });
})();
