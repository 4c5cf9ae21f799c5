/* The page: decodes its data, lays out curves and tokens, and follows a run that is still going on. */

const $ = (selector, root = document) => root.querySelector(selector);
const state = { data: null, lens: null, plotly: null, drawn: new Map() };

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
  state.lens = new Lens($("#lens"), state.data.lens);
  $("#curve-controls").hidden = false;
  $("#axis").addEventListener("change", redrawAll);
  layCharts();
  document.documentElement.dataset.ready = "1";
  const seconds = Number(document.documentElement.dataset.watch);
  if (seconds) follow(seconds);
}

start().catch((error) => { live(`This page could not be shown: ${error.message || error}. It needs a browser of 2023 or newer.`); });
