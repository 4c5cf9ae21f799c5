/* Tokens as text that a person can see, the shades they are drawn in, and the legend of both. All text becomes text nodes. */

const LEVELS = 10; // Shades on either side of 0.

/** What blue and orange say, by what one colours by. */
const SAYS = {
  log_ratio: ["the teacher finds the token likelier than the student", "the teacher finds it less likely: it rejects it"],
  token_reward: ["the token is rewarded", "the token is punished"],
  return: ["the token and what follows it are rewarded", "the token and what follows it are punished"],
  advantage: ["the update makes the token likelier", "the update makes it less likely"],
};

/** Where a value lies between -1 and 1. The square root lets small values show beside the rare large ones. */
function strength(x, scale) {
  return Math.sign(x) * Math.min(1, Math.sqrt(Math.abs(x) / scale));
}

/** The shade of a value: -LEVELS to LEVELS, 0 where there is no number. */
function level(value, scale) {
  const x = numeric(value);
  return x === null || !(scale > 0) ? 0 : Math.sign(x) * Math.round(LEVELS * Math.abs(strength(x, scale)));
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

/** An element that stands at its value on the bar of the legend: in the middle of the shade that the value has. */
function placed(node, value, scale) {
  node.style.setProperty("--at", (LEVELS * strength(value, scale) + LEVELS + 0.5) / (2 * LEVELS + 1));
  return node;
}

/** The bar of all shades, with the values they stand for. */
function shadeBar(scale, floor) {
  const cells = Array.from({ length: 2 * LEVELS + 1 }, (_, i) => el("i", { class: `lens-token${shade(i - LEVELS)}` }));
  const bar = el("div", { class: "lens-bar", "aria-hidden": "true" }, ...cells);
  if (floor !== null) bar.append(placed(el("span", { class: "lens-floor" }, `floor ${short(floor)}`), floor, scale));
  const ticks = [-scale, -scale / 4, 0, scale / 4, scale].map((value) =>
    placed(el("span", {}, `${value > 0 ? "+" : ""}${short(value)}`), value, scale));
  return el("div", { class: "lens-scale" }, bar, el("div", { class: "lens-ticks" }, ...ticks));
}

/** What the shades of a stream stand for, and the marks on tokens. */
function legendOf(run, stream) {
  const scale = run.scale[stream.key];
  const end = short(scale);
  const [up, down] = SAYS[stream.key] ?? ["above 0", "below 0"];
  const floored = stream.key === "token_reward" && run.floor != null;
  const key = (name, sample, text, more = {}) =>
    el("li", more, el("span", { class: name, "aria-hidden": "true" }, sample), ` ${text}`);
  return [
    shadeBar(scale, floored ? run.floor : null),
    el("div", {},
      el("p", {}, el("strong", {}, stream.label), `${stream.unit && ` (${stream.unit})`}: ${stream.meaning}. Blue: ${up}. Orange: ${down}. `,
        `Shades grow with the square root: half way at \u00b1${short(scale / 4)}, full from \u00b1${end} on, `,
        "the 99th percentile of the tokens in this page",
        floored ? ` (or the floor, if that is further). No token reward is below the floor, ${run.floor_words}.` : "."),
      el("ul", {},
        key("lens-token lens-low lens-down-6", "abc", `bar below: under \u2212${short(scale / 4)}`),
        key("lens-token lens-down-2", "abc", "underlined: below 0", { class: "lens-forced" }),
        key("lens-token lens-clipped", "abc", "dots above: clipped by the update"),
        key("lens-token lens-special", "end", "special token"),
        key("lens-mark", "U+202E", "no visible character"))),
  ];
}
