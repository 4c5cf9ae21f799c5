/* Elements and numbers, for everything on the page. */

const $ = (selector, root = document) => root.querySelector(selector);

/** What the parts of the page share: its data, the lens, the plotting library once asked for, and the curves on the screen. */
const state = { data: null, lens: null, plotly: null, drawn: new Map() };

/** An element. Attributes that are false or null are left out; children are nodes or plain text. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

const button = (text, attributes, onClick) => {
  const node = el("button", { type: "button", ...attributes }, text);
  node.addEventListener("click", onClick);
  return node;
};

/** A number of the data: finite, infinite, or null where there is none. */
function numeric(value) {
  if (value === "-inf") return -Infinity;
  if (value === "inf") return Infinity;
  return typeof value === "number" ? value : null;
}

/** A number as people read it: 4 decimals, or an exponent where those would hide it. */
function written(value) {
  const x = numeric(value);
  if (x === null) return "not finite";
  if (!Number.isFinite(x)) return x < 0 ? "\u2212\u221e" : "\u221e";
  const exponent = x !== 0 && (Math.abs(x) < 0.001 || Math.abs(x) >= 1e6);
  return (exponent ? x.toExponential(2) : x.toFixed(4)).replaceAll("-", "\u2212");
}

/** A number with three digits and no useless zeros: for a legend, and to be spoken. */
function short(value) {
  const x = numeric(value);
  if (x === null || !Number.isFinite(x)) return written(value);
  const digits = Math.abs(x) >= 1000 && Math.abs(x) < 1e6 ? Math.round(x) : Number(x.toPrecision(3));
  const exponent = digits !== 0 && (Math.abs(digits) < 0.0001 || Math.abs(digits) >= 1e6);
  return (exponent ? String(Number(digits).toExponential()) : String(digits)).replaceAll("-", "\u2212");
}

const counted = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
const inPage = (some, all, noun, where = "") =>
  `${some} of ${counted(all, noun)}${where} ${all === 1 ? "is" : "are"} in this page`;

const last = (list) => list[list.length - 1];

/** The entry whose number is nearest to the wanted one. */
const nearest = (entries, key, wanted) =>
  entries.reduce((best, one) => (Math.abs(one[key] - wanted) < Math.abs(best[key] - wanted) ? one : best));

/** Fills a select, unless it says the same already: an open one would close. */
function fill(select, options, chosen) {
  const key = JSON.stringify(options);
  if (select.dataset.options !== key) {
    select.replaceChildren(...options.map(([value, text]) => el("option", { value }, text)));
    select.dataset.options = key;
  }
  select.value = String(chosen);
}

/** A box that a wide table scrolls in, by mouse and by keyboard. */
const scrolling = (name, child) => el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, child);

/** A word of a command line, quoted where a shell asks for it. */
function shellWord(text) {
  const safe = text.startsWith("-") ? `./${text}` : text;
  return /^[\w@%+=:,./~-]+$/.test(safe) ? safe : `'${safe.replaceAll("'", "'\\''")}'`;
}
