/* One completion of the lens, token by token, and the panel with the numbers of one token. */

const PART = 2000; // Tokens of a completion that are drawn at first.

/** Rows of the details: field, label, and the unit unless the run's streams say it. */
const FIELDS = [
  ["token", "token", ""],
  ["token_id", "token id", ""],
  ["position", "position", "from 0"],
  ["behaviour_logprob", "student log-prob", "nats"],
  ["teacher_logprob", "teacher log-prob", "nats"],
  ["probability_ratio", "probability ratio", "\u00d7"],
  ["log_ratio", "log-ratio", ""],
  ["token_reward", "token reward", ""],
  ["return", "return", ""],
  ["advantage", "advantage", ""],
  ["importance_ratio", "importance ratio", "\u00d7"],
  ["clipped", "clipped", ""],
];

/** Fields that only a teacher gives. */
const TEACHERS = new Set(["teacher_logprob", "probability_ratio", "log_ratio"]);

/** Fields that are streams of a rollout, shown as they are. */
const STREAMS = ["behaviour_logprob", "teacher_logprob", "log_ratio", "token_reward", "return", "advantage", "importance_ratio"];

/** The card of a rollout. It draws the tokens `from` <= position < `to`; one of them is the tab stop. */
class Card {
  constructor(run, rollout, before) {
    this.run = run;
    this.rollout = rollout;
    this.special = new Set(run.special);
    this.length = rollout.ids.length;
    const kept = before && before.to <= this.length && before.to > 0;
    [this.from, this.to] = kept ? [before.from, before.to] : [0, Math.min(PART, this.length)];
    this.active = Math.min(before?.active ?? 0, Math.max(0, this.length - 1));
    this.body = el("div", { class: "lens-scroll" });
    this.element = el("article", { class: "lens-card", "data-card": rollout.index }, this.head(), this.body);
    this.draw();
  }

  head() {
    const { index, grade, finish_reason: reason, update, mean_token_reward: mean, num_tokens: all } = this.rollout;
    const facts = [reason === "length" ? "cut off" : reason === "stop" ? "ended" : reason, counted(all, "token")];
    facts.push(update == null ? "in no update" : `in update ${update}`);
    if (mean != null) facts.push(`mean token reward ${written(mean)}`);
    if (all > this.length) facts.push(`the first ${this.length.toLocaleString("en")} tokens are in this page`);
    const [kind, mark] = grade === 1 ? ["right", "\u2713 right"] : grade === 0 ? ["wrong", "\u2717 wrong"]
      : ["other", grade == null ? "not graded" : `grade ${written(grade)}`];
    return el("header", { class: "lens-head" },
      el("h3", {}, `Rollout ${index}`),
      el("span", { class: "lens-grade", "data-grade": kind }, mark),
      el("p", {}, ...facts.map((fact) => el("span", {}, fact))));
  }

  shown(position) {
    const id = this.rollout.ids[position];
    return this.rollout.shown?.[position] ?? this.run.vocabulary[id] ?? [["m", `id ${id}`]];
  }

  draw() {
    this.pieces = []; // [position, span], several where a token goes over a line end
    this.spans = new Map(); // position -> its first span
    const text = el("div", {
      class: "lens-text", role: "group", "aria-label": `Completion of rollout ${this.rollout.index}. Arrow keys move by token.`,
    });
    const positions = Array.from({ length: this.to - this.from }, (_, i) => this.from + i);
    layOut(text, positions.map((position) => this.shown(position)), (i, rest) => this.open(positions[i], rest));
    if (!this.length) text.append(el("p", { class: "lens-note" }, "no tokens"));
    this.body.replaceChildren(
      ...(this.from > 0 ? [this.more("previous", this.from)] : []), text,
      ...(this.to < this.length ? [this.more("next", this.length - this.to)] : []));
    this.activate(Math.max(this.from, Math.min(this.active, this.to - 1)));
    this.pin(this.pinned ?? null);
    if (this.colouring) this.paint(...this.colouring);
  }

  open(position, rest) {
    const span = el("span", rest ? { "data-rest": position } : { "data-position": position });
    span.dataset.rollout = this.rollout.index;
    this.pieces.push([position, span]);
    if (!rest) this.spans.set(position, span);
    return span;
  }

  more(which, left) {
    const size = Math.min(PART, left).toLocaleString("en");
    const text = `show the ${which} ${size} of ${this.length.toLocaleString("en")} tokens`;
    return button(text, { class: "lens-more" }, () => {
      const goal = which === "next" ? this.to : this.from - 1;
      this.focus(goal);
    });
  }

  /** Draws the part that holds the token, if it is not there yet; next to what is there if it can be. */
  reveal(position) {
    if (position >= this.from && position < this.to) return;
    const start = Math.floor(position / PART) * PART;
    const end = Math.min(start + PART, this.length);
    const touches = start <= this.to && end >= this.from;
    this.from = touches ? Math.min(this.from, start) : start;
    this.to = touches ? Math.max(this.to, end) : end;
    this.draw();
  }

  /** Colours every token by a stream; `key` is null where there is nothing to colour by. */
  paint(key, scale) {
    this.colouring = [key, scale];
    const { ids, clipped } = this.rollout;
    const values = key === null ? null : this.rollout[key];
    for (const [position, span] of this.pieces) {
      const value = values?.[position];
      const x = numeric(value);
      const name = "lens-token" + shade(level(value, scale)) + (x !== null && x < -scale / 4 ? " lens-low" : "") +
        (clipped?.[position] === 1 ? " lens-clipped" : "") + (this.special.has(ids[position]) ? " lens-special" : "");
      if (span.className !== name) span.className = name;
    }
  }

  at(position) {
    return this.spans.get(position);
  }

  /** Moves the focus to a token, or to the last one if there are fewer. */
  focus(position) {
    if (!this.length) return;
    const goal = Math.max(0, Math.min(position, this.length - 1));
    this.reveal(goal);
    this.activate(goal);
    this.at(goal).focus();
  }

  /** Makes a token the tab stop of the completion: a button that pins it, with its numbers as a name. */
  activate(position) {
    for (const name of ["tabindex", "role", "aria-label", "aria-pressed"]) this.at(this.active)?.removeAttribute(name);
    this.active = position;
    const named = { tabindex: "0", role: "button", "aria-label": this.spoken(position), "aria-pressed": this.pinned === position };
    for (const [name, value] of Object.entries(named)) this.at(position)?.setAttribute(name, value);
  }

  /** A token and its numbers in words. */
  spoken(position) {
    const numbers = this.run.streams.filter(({ key }) => this.rollout[key])
      .map(({ key, label }) => `${label} ${short(this.rollout[key][position])}`);
    const marks = [
      this.special.has(this.rollout.ids[position]) && "special token", this.rollout.clipped?.[position] === 1 && "clipped",
    ];
    const text = plain(this.shown(position)).trim() || "space";
    return [`token ${position}`, text, ...numbers, ...marks.filter(Boolean)].join(", ");
  }

  /** Marks a token as pinned; none if it is null. */
  pin(position) {
    this.at(this.pinned)?.removeAttribute("data-pinned");
    this.pinned = position;
    this.at(position)?.setAttribute("data-pinned", "");
    this.at(this.active)?.setAttribute("aria-pressed", this.active === position);
  }
}

class Details {
  constructor(unpin) {
    this.title = el("h3");
    this.unpin = button("unpin", { class: "lens-unpin", title: "Escape does the same" }, unpin);
    this.values = new Map(FIELDS.map(([field]) => [field, el("span", { "data-field": field })]));
    this.units = new Map(FIELDS.map(([field, , unit]) => [field, el("small", {}, unit && ` ${unit}`)]));
    this.rows = new Map(FIELDS.map(([field, label]) => [field, el("div", {},
      el("dt", {}, label), el("dd", {}, this.values.get(field), this.units.get(field)))]));
    this.element = el("aside", { class: "lens-details", "aria-label": "Numbers of the token" },
      el("div", { class: "lens-title" }, this.title, this.unpin), el("dl", {}, ...this.rows.values()),
      el("p", { class: "lens-note" }, "Arrow keys move by token. Click or Enter pins one, Esc lets it go."));
  }

  /** Shows a token of a card, or how to choose one if there is no card. */
  show(card, position, pinned) {
    this.element.toggleAttribute("data-empty", !card);
    this.unpin.hidden = !pinned;
    this.title.textContent = card ? `Rollout ${card.rollout.index} \u00b7 token ${position}` : "Point at a token";
    if (!card) return this.values.forEach((_, field) => this.put(field, null, "\u2013"));
    const { rollout } = card;
    this.put("token", plain(card.shown(position)), inline(card.shown(position)));
    this.put("token_id", rollout.ids[position], rollout.ids[position]);
    this.put("position", position, position);
    const stream = (field, values, read = (value) => value, say = written) => {
      const value = values ? read(values[position]) : null;
      this.put(field, value, values ? say(value) : "not stored");
    };
    for (const key of STREAMS) stream(key, rollout[key]);
    stream("probability_ratio", rollout.log_ratio, (value) => (numeric(value) === null ? null : Math.exp(numeric(value))));
    stream("clipped", rollout.clipped, Number, (value) => (value === 1 ? "yes" : "no"));
  }

  put(field, value, shown) {
    const node = this.values.get(field);
    node.replaceChildren(shown);
    node.dataset.value = value ?? "";
    node.classList.toggle("lens-absent", value == null);
  }

  /** Takes over what a run's streams are counted in, and which of them colours the tokens. */
  choose(run, chosen) {
    for (const { key, unit } of run.streams) this.units.get(key)?.replaceChildren(` ${unit}`);
    for (const [field, row] of this.rows) {
      row.toggleAttribute("data-chosen", field === chosen);
      row.hidden = TEACHERS.has(field) && !run.has_teacher;
    }
  }
}
