/* Elements and numbers, for everything on the page. */

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

const counted = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
const inPage = (some, all, noun, where = "") =>
  `${some} of ${counted(all, noun)}${where} ${all === 1 ? "is" : "are"} in this page`;
