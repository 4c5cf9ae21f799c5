/* Tokens as text that a person can see, and the shades they are drawn in. All text becomes text nodes. */

const LEVELS = 10; // Shades on either side of 0.

/** The shade of a value: -LEVELS to LEVELS, 0 where there is no number. */
function level(value, scale) {
  const x = numeric(value);
  if (x === null || !(scale > 0)) return 0;
  return Math.max(-LEVELS, Math.min(LEVELS, Math.round((x / scale) * LEVELS)));
}

function shade(number) {
  if (number === 0) return "";
  return ` ${number > 0 ? "lens-up" : "lens-down"}-${Math.abs(number)}`;
}

/** What is shown for a token, as [kind, text] pairs; every line end stands alone. */
function segments(shown) {
  const found = typeof shown === "string" ? [["t", shown]] : shown;
  if (!found.some(([, text]) => text)) return [["m", "empty"]];
  return found.flatMap(([kind, text]) => (kind === "n" ? Array.from(text, () => ["n", "\n"]) : [[kind, text]]));
}

function drawn([kind, text]) {
  if (kind === "s") return el("span", { class: "lens-space" }, text);
  if (kind === "n") return el("span", { class: "lens-newline" }, "\u23ce");
  if (kind === "m") return el("span", { class: "lens-mark" }, text);
  return document.createTextNode(text);
}

/** Plain text on one line: marks in angle brackets, a line end as an arrow. */
const plain = (shown) =>
  segments(shown).map(([kind, text]) => (kind === "m" ? `<${text}>` : kind === "n" ? "\u23ce" : text)).join("");

/** On one line, apart from the direction of the text around it. */
const inline = (shown, attributes = {}) => el("bdi", attributes, ...segments(shown).map(drawn));

/**
 * Lays pieces out in `block`, one element per line, each with its own direction.
 * `open(i, rest)` makes the span of piece i; `rest` is true after a line end within the piece.
 */
function layOut(block, pieces, open) {
  let line = null;
  pieces.forEach((shown, i) => {
    let span = null;
    let rest = false;
    for (const segment of segments(shown)) {
      line ??= block.appendChild(el("div", { class: "lens-line", dir: "auto" }));
      span ??= line.appendChild(open(i, rest));
      span.append(drawn(segment));
      if (segment[0] === "n") [line, span, rest] = [null, null, true];
    }
  });
  return block;
}

const paragraph = (shown) => layOut(el("div", { class: "lens-text" }), [shown], () => el("span"));
