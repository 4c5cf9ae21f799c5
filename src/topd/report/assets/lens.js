/**
 * The token lens of the report: which tokens did the teacher reject, and what credit did they get.
 *
 * `TopdLens.mount(root, data)` draws it into `root`; the `update(data)` of what it returns keeps what one looks at.
 * All text in `data` was written by a model: it reaches the page as text nodes only.
 */
(() => {
  "use strict";

  const PART = 2000; // Tokens of a completion that are drawn at first.
  const LEVELS = 10; // Shades on either side of 0.

  /** What blue and orange say, by what one colours by. */
  const SAYS = {
    log_ratio: ["the teacher finds the token likelier than the student", "the teacher finds it less likely: it rejects it"],
    reward: ["the token is rewarded", "the token is punished"],
    return: ["the token and what follows it are rewarded", "the token and what follows it are punished"],
    advantage: ["the update makes the token likelier", "the update makes it less likely"],
  };

  /** Rows of the details: field, label, unit. */
  const FIELDS = [
    ["token", "token", ""],
    ["token_id", "token id", ""],
    ["position", "position", "from 0"],
    ["student_logprob", "student log-prob", "nats"],
    ["teacher_logprob", "teacher log-prob", "nats"],
    ["probability_ratio", "probability ratio", "\u00d7"],
    ["log_ratio", "log-ratio", "nats"],
    ["reward", "reward", "nats"],
    ["return", "return", "nats"],
    ["advantage", "advantage", "group std"],
    ["importance_ratio", "importance ratio", "\u00d7"],
    ["clipped", "clipped", ""],
  ];

  /** Fields that are streams of a rollout, shown as they are. */
  const STREAMS = ["student_logprob", "teacher_logprob", "log_ratio", "reward", "return", "advantage", "importance_ratio"];

  // ---- Small things -------------------------------------------------------------------------------------------------

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

  // ---- Text ---------------------------------------------------------------------------------------------------------

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

  // ---- One completion -----------------------------------------------------------------------------------------------

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
      const { index, grade, finish_reason: reason, update, mean_reward: mean, num_tokens: all } = this.rollout;
      const facts = [reason === "length" ? "cut off" : reason === "stop" ? "ended" : reason, counted(all, "token")];
      facts.push(update == null ? "in no update" : `in update ${update}`);
      if (mean != null) facts.push(`mean reward ${written(mean)}`);
      if (all > this.length) facts.push(`the first ${this.length.toLocaleString("en")} tokens are in this page`);
      const [kind, mark] = grade === 1 ? ["right", "\u2713 right"] : grade === 0 ? ["wrong", "\u2717 wrong"]
        : ["other", grade == null ? "not graded" : `grade ${written(grade)}`];
      return el("header", { class: "lens-head" },
        el("h4", {}, `Rollout ${index}`),
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
        const name = "lens-token" + shade(level(value, scale)) + (x !== null && x < -scale / 2 ? " lens-low" : "") +
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

    /** Makes a token the tab stop of the completion. */
    activate(position) {
      this.at(this.active)?.removeAttribute("tabindex");
      this.active = position;
      this.at(position)?.setAttribute("tabindex", "0");
    }

    /** Marks a token as pinned; none if it is null. */
    pin(position) {
      this.at(this.pinned)?.removeAttribute("data-pinned");
      this.pinned = position;
      this.at(position)?.setAttribute("data-pinned", "");
    }
  }

  // ---- The numbers of one token -------------------------------------------------------------------------------------

  class Details {
    constructor(unpin) {
      this.title = el("h4");
      this.unpin = button("unpin", { class: "lens-unpin", title: "Escape does the same" }, unpin);
      this.values = new Map(FIELDS.map(([field]) => [field, el("span", { "data-field": field })]));
      this.rows = new Map(FIELDS.map(([field, label, unit]) => [field, el("div", {},
        el("dt", {}, label), el("dd", {}, this.values.get(field), unit && el("small", {}, ` ${unit}`)))]));
      this.element = el("aside", { class: "lens-details", "aria-live": "polite", "aria-label": "Numbers of the token" },
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

    choose(key) {
      for (const [field, row] of this.rows) row.toggleAttribute("data-chosen", field === key);
    }
  }

  // ---- The whole lens -----------------------------------------------------------------------------------------------

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

  /** A link's part behind the `#`, as a choice; null if it is none of ours. Whatever it names may not exist. */
  function choiceOf(hash) {
    try {
      const parts = decodeURIComponent(hash).match(/^#lens=(.*)\.(\d{1,9})\.(\d{1,9})\.(\w+)$/s);
      return parts && { run: parts[1], step: Number(parts[2]), group: Number(parts[3]), colour: parts[4] };
    } catch {
      return null;
    }
  }

  class Lens {
    constructor(root, data) {
      this.choice = choiceOf(location.hash) ?? {};
      this.pin = null; // { rollout, position }
      this.cards = new Map(); // rollout index -> Card
      this.radios = new Map(); // stream -> radio button
      this.details = new Details(() => this.unpin());
      this.build(root);
      this.listen();
      this.update(data);
      if (choiceOf(location.hash)) root.scrollIntoView();
    }

    build(root) {
      this.runs = el("select", { "aria-label": "Run", "data-control": "run" });
      this.steps = el("select", { "aria-label": "Step", "data-control": "step" });
      this.prompts = el("select", { "aria-label": "Prompt", "data-control": "prompt" });
      this.runField = el("label", {}, el("span", {}, "Run"), this.runs);
      this.previous = button("\u2039", { "aria-label": "previous step" }, () => this.moveStep(-1));
      this.next = button("\u203a", { "aria-label": "next step" }, () => this.moveStep(1));
      this.stepCount = el("small");
      this.promptCount = el("small");
      this.newer = button("", { class: "lens-newer" }, () => this.choose({ step: last(this.stepList).step }));
      this.colours = el("fieldset", { class: "lens-colours" }, el("legend", {}, "Colour by"));
      this.legend = el("div", { class: "lens-legend" });
      this.prompt = el("div", { class: "lens-prompt" });
      this.grid = el("div", { class: "lens-grid" });
      this.lists = el("div", { class: "lens-lists" });
      this.empty = el("p", { class: "lens-note" }, "There are no rollouts to show yet.");
      this.note = el("div", { role: "status" });
      this.content = el("div", {},
        el("div", { class: "lens-controls" }, this.runField,
          el("div", { class: "lens-step" },
            el("label", {}, el("span", {}, "Step"), this.steps), this.previous, this.next, this.stepCount),
          el("label", { class: "lens-pick" }, el("span", {}, "Prompt"), this.prompts, this.promptCount), this.colours),
        this.note, this.legend,
        el("div", { class: "lens-body" }, el("div", { class: "lens-main" }, this.prompt, this.grid), this.details.element),
        this.lists);
      this.element = el("section", { class: "lens", "aria-label": "Token lens" }, this.empty, this.content);
      root.replaceChildren(this.element);
    }

    listen() {
      this.runs.addEventListener("change", () => this.choose({ run: this.runList[this.runs.value].name, step: undefined }));
      this.steps.addEventListener("change", () => this.choose({ step: Number(this.steps.value) }));
      this.prompts.addEventListener("change", () => this.choose({ group: Number(this.prompts.value) }));
      this.colours.addEventListener("change", (event) => this.choose({ colour: event.target.value }));
      this.grid.addEventListener("mouseover", (event) => this.point(event));
      this.grid.addEventListener("mouseleave", () => this.look(null, this.focused));
      this.grid.addEventListener("focusin", (event) => this.look(null, this.find(event.target)));
      this.grid.addEventListener("focusout", (event) => this.look(this.pointed, this.find(event.relatedTarget)));
      this.grid.addEventListener("click", (event) => getSelection().isCollapsed && this.press(this.find(event.target)));
      this.grid.addEventListener("keydown", (event) => this.key(event));
      this.element.addEventListener("keydown", (event) => event.key === "Escape" && this.unpin());
      window.addEventListener("hashchange", () => {
        const choice = choiceOf(location.hash);
        if (choice) this.choose(choice);
      });
    }

    /** Shows newer data, and of it what was looked at. */
    update(data) {
      this.data = data;
      this.draw();
    }

    /** A choice of the reader: changes some of run, step, group and colour. */
    choose(change) {
      Object.assign(this.choice, change);
      if ("step" in change) this.known = undefined;
      this.draw();
      const { run, step, group, colour } = this.choice;
      try {
        history.replaceState(null, "", `#lens=${encodeURIComponent(run)}.${step}.${group}.${colour}`);
      } catch {
        // Some places do not let a page change its address. The lens works without.
      }
    }

    moveStep(by) {
      this.choose({ step: this.stepList[this.stepList.indexOf(this.step) + by].step });
    }

    /** Finds what is chosen in the data, or what is nearest to it. False if there is nothing at all. */
    settle() {
      const { choice } = this;
      const filled = (run) => run.steps.filter((step) => step.groups.length);
      this.runList = this.data.runs.filter((run) => filled(run).length);
      if (!this.runList.length) return false;
      this.run = this.runList.find((run) => run.name === choice.run) ?? this.runList[0];
      this.stepList = filled(this.run);
      this.step = choice.step === undefined ? last(this.stepList) : nearest(this.stepList, "step", choice.step);
      this.group = this.step.groups.find((group) => group.index === choice.group)
        ?? this.step.groups.find((group) => group.index === this.step.worst[0]?.group) ?? this.step.groups[0];
      const there = this.data.streams.filter((stream) => this.has(stream.key));
      this.stream = there.find((stream) => stream.key === choice.colour) ?? there[0] ?? null;
      this.known ??= last(this.stepList).step; // The newest step when the reader last chose one.
      Object.assign(choice, { run: this.run.name, step: this.step.step, group: this.group.index });
      choice.colour = this.stream?.key ?? choice.colour;
      return true;
    }

    has(key) {
      return this.run.scale?.[key] != null;
    }

    draw() {
      const found = this.settle();
      this.empty.hidden = found;
      this.content.hidden = !found;
      if (!found) return;
      this.drawControls();
      this.drawLegend();
      this.drawGroup();
      this.drawLists();
      this.paint();
      this.showDetails();
    }

    drawControls() {
      const { run, step, stepList, runList } = this;
      this.runField.hidden = runList.length < 2;
      fill(this.runs, runList.map((one, i) => [i, one.name]), runList.indexOf(run));
      fill(this.steps, stepList.map((one) => [one.step, one.step]), step.step);
      fill(this.prompts, step.groups.map((one) => [one.index, this.summary(one)]), this.group.index);
      const newest = last(stepList).step;
      this.previous.disabled = step === stepList[0];
      this.next.disabled = step.step === newest;
      this.stepCount.textContent = inPage(stepList.length, run.num_steps, "step");
      this.promptCount.textContent = inPage(step.groups.length, step.num_groups, "prompt", " of this step");
      this.newer.textContent = `a newer step is there: go to step ${newest}`;
      this.note.replaceChildren(...(newest > this.known ? [this.newer] : []));
      for (const { key, label } of this.data.streams) {
        if (!this.radios.has(key)) this.radios.set(key, this.radio(key, label));
        const radio = this.radios.get(key);
        radio.checked = key === this.stream?.key;
        radio.disabled = !this.has(key);
      }
    }

    radio(key, label) {
      const input = el("input", { type: "radio", name: "lens-colour", value: key });
      this.colours.append(el("label", {}, input, el("span", {}, label)));
      return input;
    }

    summary(group) {
      const start = plain(group.prompt).trim();
      const right = group.rollouts.filter((rollout) => rollout.grade === 1).length;
      const cut = start.length > 40 ? `${Array.from(start).slice(0, 40).join("")}\u2026` : start;
      return `${group.index}: \u2068${cut}\u2069 \u2014 ${right}/${group.rollouts.length} right`;
    }

    drawLegend() {
      const { run, stream } = this;
      this.details.choose(stream?.key);
      if (!stream) {
        this.legend.replaceChildren(el("p", {}, "This run stored no numbers of a teacher, so there is nothing to colour by."));
        return;
      }
      const scale = run.scale[stream.key];
      const [up, down] = SAYS[stream.key] ?? ["above 0", "below 0"];
      const cells = Array.from({ length: 2 * LEVELS + 1 }, (_, i) => el("i", { class: `lens-token${shade(i - LEVELS)}` }));
      const bar = el("div", { class: "lens-bar", "aria-hidden": "true" }, ...cells);
      const end = written(scale);
      const ends = el("div", { class: "lens-ends" }, ...[`\u2212${end}`, "0", `+${end}`].map((text) => el("span", {}, text)));
      const floored = stream.key === "reward" && run.floor != null;
      if (floored) {
        const tick = el("span", { class: "lens-floor" }, `floor ${written(run.floor)}`);
        tick.style.setProperty("--at", Math.max(0, Math.min(1, (run.floor / scale + 1) / 2)));
        bar.append(tick);
      }
      const key = (name, sample, text) => el("li", {}, el("span", { class: name, "aria-hidden": "true" }, sample), ` ${text}`);
      this.legend.replaceChildren(
        el("div", { class: "lens-scale" }, bar, ends),
        el("div", {},
          el("p", {}, el("strong", {}, stream.label), ` in ${stream.unit}: ${stream.meaning}. Blue: ${up}. Orange: ${down}. `,
            `Colours are full at \u00b1${end}.`, floored ? ` No reward is below the floor, ${run.floor_words}.` : ""),
          el("ul", {},
            key("lens-token lens-low lens-down-6", "abc", `bar below: under \u2212${written(scale / 2)}`),
            key("lens-token lens-clipped", "abc", "dots above: clipped by the update"),
            key("lens-token lens-special", "end", "special token"),
            key("lens-mark", "U+202E", "no visible character"))));
    }

    /** Draws the prompt and its completions, unless they are there already. */
    drawGroup() {
      const { run, step, group } = this;
      const place = JSON.stringify([run.name, step.step, group.index]);
      const same = place === this.drawnPlace;
      if (same && (group === this.drawnGroup || JSON.stringify(group) === JSON.stringify(this.drawnGroup))) return;
      const held = same ? this.find(document.activeElement) : null;
      const before = same ? this.cards : new Map();
      this.cards = new Map(group.rollouts.map((rollout) => [rollout.index, new Card(run, rollout, before.get(rollout.index))]));
      this.prompt.replaceChildren(
        el("div", {}, el("h3", {}, "Prompt"), paragraph(group.prompt)),
        group.answer == null ? "" : el("div", {}, el("h3", {}, "Right answer"), paragraph(group.answer)),
        el("p", { class: "lens-note" }, ...[group.prompt_id, group.domain].filter(Boolean).flatMap((name) => [inline(name), " \u00b7 "]),
          `sampled by policy version ${group.policy_version}`));
      this.grid.replaceChildren(...[...this.cards.values()].map((card) => card.element));
      if (!same) this.pin = null;
      Object.assign(this, { drawnPlace: place, drawnGroup: group, pointed: null, focused: null });
      if (held) this.cards.get(held.card.rollout.index)?.focus(held.position);
    }

    drawLists() {
      const { worst, credited } = this.step;
      const list = (name, title, says, entries) => el("div", { hidden: !entries.length },
        el("h3", {}, title), el("p", { class: "lens-note" }, says),
        el("ol", { "data-list": name }, ...entries.map((entry) => this.entry(entry))));
      this.lists.replaceChildren(
        list("worst", "Worst rejected", "The lowest log-ratios of the whole step, in nats.", worst ?? []),
        list("credited", "Most credited", "The highest advantages of the whole step, in group std.", credited ?? []));
    }

    entry(entry) {
      const place = `group ${entry.group} \u00b7 rollout ${entry.rollout} \u00b7 token ${entry.token}`;
      const go = button("", { disabled: !entry.in_page }, () => this.jump(entry));
      const value = el("span", { class: "lens-number" }, written(entry.value));
      go.append(inline(entry.shown, { class: "lens-chip" }), value, el("span", {}, place));
      if (entry.in_page) return el("li", {}, go);
      const command = `topd explain ${this.run.name} --step ${this.step.step} --group ${entry.group}`;
      return el("li", {}, go, el("small", {}, "not in this page: ", el("code", {}, command)));
    }

    paint() {
      const key = this.stream?.key ?? null;
      for (const card of this.cards.values()) card.paint(key, key === null ? 0 : this.run.scale[key]);
    }

    // ---- One token: pointed at, focused, pinned ---------------------------------------------------------------------

    /** The card and position of the token that a node lies in; null if it is in none. */
    find(node) {
      const span = node?.closest?.(".lens-token[data-rollout]");
      const card = span && this.grid.contains(span) && this.cards.get(Number(span.dataset.rollout));
      return card ? { card, position: Number(span.dataset.position ?? span.dataset.rest) } : null;
    }

    point(event) {
      const place = `${event.screenX} ${event.screenY}`;
      if (place === this.mouse) return; // The page scrolled below a mouse at rest.
      this.mouse = place;
      this.look(this.find(event.target), this.focused);
    }

    look(pointed, focused) {
      Object.assign(this, { pointed, focused });
      this.showDetails();
    }

    showDetails() {
      const pinned = this.pin && this.cards.get(this.pin.rollout);
      if (!(this.pin?.position < pinned?.length)) this.pin = null;
      for (const card of this.cards.values()) card.pin(this.pin && card === pinned ? this.pin.position : null);
      const token = this.pin ? { card: pinned, position: this.pin.position } : this.pointed ?? this.focused;
      this.details.show(token?.card, token?.position, Boolean(this.pin));
    }

    press(token) {
      if (!token) return;
      const { card, position } = token;
      const same = this.pin?.rollout === card.rollout.index && this.pin.position === position;
      this.pin = same ? null : { rollout: card.rollout.index, position };
      card.focus(position);
      this.showDetails();
    }

    unpin() {
      if (!this.pin) return;
      const { rollout, position } = this.pin;
      this.pin = null;
      if (this.details.unpin === document.activeElement) this.cards.get(rollout)?.focus(position);
      this.showDetails();
    }

    key(event) {
      const token = this.find(event.target);
      if (!token || event.ctrlKey || event.metaKey || event.altKey) return;
      const { card, position } = token;
      const cards = [...this.cards.values()].filter((one) => one.length);
      const beside = (by) => cards[cards.indexOf(card) + by] ?? card;
      const moves = {
        ArrowLeft: [card, position - 1], ArrowRight: [card, position + 1], ArrowUp: [beside(-1), position],
        ArrowDown: [beside(1), position], Home: [card, 0], End: [card, card.length - 1],
      };
      if (event.key === "Enter" || event.key === " ") this.press(token);
      else if (event.key in moves) moves[event.key][0].focus(moves[event.key][1]);
      else return;
      event.preventDefault();
    }

    /** Goes to a token of one of the lists. */
    jump(entry) {
      this.choose({ group: entry.group });
      const card = this.cards.get(entry.rollout);
      card?.focus(entry.token);
      const span = card?.at(entry.token);
      span?.scrollIntoView({ block: "center" });
      span?.setAttribute("data-flash", "");
      setTimeout(() => span?.removeAttribute("data-flash"), 2000);
    }
  }

  window.TopdLens = {
    /** Draws the lens into `root`, an empty element. */
    mount(root, data) {
      const lens = new Lens(root, data);
      return { update: (newer) => lens.update(newer) };
    },
  };
})();
