/* The page: decodes its data, lays out curves and tokens, and follows a run that is still going on. */

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

/** What a section was made from: it is replaced only by something else. */
const sources = new Map();

/** Looks for news every so many seconds. What it says changes only with what there is to say: it is read out. */
async function follow(seconds) {
  let known = document.documentElement.dataset.state;
  let words = $("#live").textContent;
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
    if (document.hidden) continue;
    try {
      const now = await asked("state");
      if (now !== known) {
        known = await refresh(await asked("./")) ?? now;
        words = `Live: this page follows the run; newest data from ${new Date().toLocaleTimeString("en-GB")}.`;
      }
      live(words);
    } catch (error) {
      live(error.message || String(error));
    }
  }
}

async function asked(address) {
  const answer = await fetch(address, { cache: "no-store" }).catch(() => {
    throw new Error("The server of this page does not answer. Is `topd report --watch` still running?");
  });
  const text = await answer.text();
  if (!answer.ok) throw new Error(`The server of this page has no newer one: ${text.trim()}`);
  return text;
}

function live(words) {
  const place = $("#live");
  if (place.textContent !== words) place.textContent = words;
}

/** What an element goes by when its section is replaced. */
const nameOf = (node) => node.closest("[data-key]")?.dataset.key ?? node.getAttribute("aria-label") ?? node.textContent;

/** Replaces what a section says. What is open stays open, and what has the focus keeps it: by name, or else by its place. */
function replace(section, newer) {
  const controls = () => [...section.querySelectorAll("summary, a[href], button, [tabindex]")];
  const before = controls();
  const held = before.indexOf(document.activeElement);
  const same = (node) => node.localName === before[held].localName && nameOf(node) === nameOf(before[held]);
  const open = new Set([...section.querySelectorAll("details[open]")].map(nameOf));
  section.replaceChildren(...document.importNode(newer, true).childNodes);
  section.hidden = newer.hidden;
  for (const each of section.querySelectorAll("details")) each.open = open.has(nameOf(each));
  if (held < 0) return;
  const after = controls();
  const nth = before.filter(same).indexOf(before[held]);
  (after.filter(same)[nth] ?? after.find(same) ?? after[held])?.focus({ preventScroll: true });
}

/** Takes over a newer page: its texts are replaced, curves and tokens are updated in place. Returns the state it is of. */
async function refresh(source) {
  const page = new DOMParser().parseFromString(source, "text/html");
  const data = JSON.parse(await unpacked($("#data", page).textContent));
  for (const section of document.querySelectorAll("[data-live]")) {
    const newer = $(`[data-live="${section.dataset.live}"]`, page);
    if (newer && newer.innerHTML !== sources.get(section)) {
      replace(section, newer);
      sources.set(section, newer.innerHTML);
    }
  }
  document.title = page.title;
  state.data = data;
  layCharts();
  state.lens.update(data.lens);
  return page.documentElement.dataset.state;
}

async function start() {
  startTheme();
  state.data = JSON.parse(await unpacked($("#data").textContent));
  state.lens = new Lens($("#lens"), state.data.lens);
  $("#curve-controls").hidden = false;
  $("#axis").addEventListener("change", redrawAll);
  for (const section of document.querySelectorAll("[data-live]")) sources.set(section, section.innerHTML);
  layCharts();
  document.documentElement.dataset.ready = "1";
  const seconds = Number(document.documentElement.dataset.watch);
  if (seconds) follow(seconds);
}

start().catch((error) => { live(`This page could not be shown: ${error.message || error}. It needs a browser of 2023 or newer.`); });
