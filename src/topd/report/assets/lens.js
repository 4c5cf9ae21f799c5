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
    ["position", "position", ""],
    ["student_logprob", "student log-prob", "nats"],
    ["teacher_logprob", "teacher log-prob", "nats"],
    ["probability_ratio", "probability ratio", "teacher / student"],
    ["log_ratio", "log-ratio", "nats"],
    ["reward", "reward", "nats"],
    ["return", "return", "nats"],
    ["advantage", "advantage", "group std"],
    ["importance_ratio", "importance ratio", "new / old policy"],
    ["clipped", "clipped", ""],
  ];

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
    if (x === null) return "not stored";
    if (!Number.isFinite(x)) return x < 0 ? "\u2212\u221e" : "\u221e";
    const exponent = x !== 0 && (Math.abs(x) < 0.001 || Math.abs(x) >= 1e6);
    return (exponent ? x.toExponential(2) : x.toFixed(4)).replaceAll("-", "\u2212");
  }

  const counted = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

  /** The shade of a value: -LEVELS to LEVELS, 0 where there is no number. */
  function level(value, scale) {
    const x = numeric(value);
    if (x === null || !(scale > 0)) return 0;
    return Math.max(-LEVELS, Math.min(LEVELS, Math.round((x / scale) * LEVELS)));
  }

  function shade(number) {
    if (number === 0) return "";
    return ` ${number > 0 ? "lens-up" : "lens-down"} lens-q${Math.abs(number)}`;
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
      this.from = before?.from ?? 0;
      this.to = Math.max(before?.to ?? 0, Math.min(PART, this.length));
      this.active = Math.min(before?.active ?? 0, Math.max(0, this.length - 1));
      this.body = el("div", { class: "lens-scroll" });
      this.element = el("article", { class: "lens-card", "data-card": rollout.index }, this.head(), this.body);
      this.draw();
    }

    head() {
      const { index, grade, finish_reason: reason, update, reward } = this.rollout;
      const facts = [reason === "length" ? "cut off" : reason === "stop" ? "ended" : reason, counted(this.length, "token")];
      const rewards = (reward ?? []).map(numeric).filter((x) => x !== null);
      if (rewards.length) facts.push(`mean reward ${written(rewards.reduce((a, b) => a + b, 0) / rewards.length)}`);
      facts.push(update == null ? "in no update" : `in update ${update}`);
      const mark = grade === 1 ? "\u2713 right" : grade === 0 ? "\u2717 wrong" : grade == null ? "not graded" : `grade ${grade.toFixed(2)}`;
      const kind = grade === 1 ? "right" : grade === 0 ? "wrong" : "other";
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
      this.pieces = [];
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
      if (this.colouring) this.paint(...this.colouring);
    }

    open(position, rest) {
      const span = el("span", rest ? { "data-rest": position } : { "data-position": position });
      span.dataset.rollout = this.rollout.index;
      this.pieces.push([position, span]);
      return span;
    }

    more(which, left) {
      const size = Math.min(PART, left).toLocaleString("en");
      const text = `show the ${which} ${size} of ${this.length.toLocaleString("en")} tokens`;
      return button(text, { class: "lens-more" }, () => {
        const goal = which === "next" ? this.to : this.from - 1;
        this.reveal(goal);
        this.activate(goal);
        this.at(goal).focus();
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
        span.className = "lens-token" + shade(level(value, scale)) + (x !== null && x < -scale / 2 ? " lens-low" : "") +
          (clipped?.[position] === 1 ? " lens-clipped" : "") + (this.special.has(ids[position]) ? " lens-special" : "");
      }
    }

    at(position) {
      return this.body.querySelector(`[data-position="${position}"]`);
    }

    /** Makes a token the tab stop of the completion. */
    activate(position) {
      this.at(this.active)?.removeAttribute("tabindex");
      this.active = position;
      this.at(position)?.setAttribute("tabindex", "0");
    }
  }

  // ---- The numbers of one token -------------------------------------------------------------------------------------

  class Details {
    constructor(unpin) {
      this.title = el("h4", {}, "Token");
      this.unpin = button("unpin", { class: "lens-unpin", hidden: true, title: "Escape does the same" }, unpin);
      this.hint = el("p", { class: "lens-note" }, "Point at a token or move to it with the keyboard to read its numbers. Click or Enter pins it.");
      this.values = new Map(FIELDS.map(([field]) => [field, el("span", { "data-field": field })]));
      this.rows = new Map(FIELDS.map(([field, label, unit]) => [field, el("div", {},
        el("dt", {}, label), el("dd", {}, this.values.get(field), unit && el("small", {}, ` ${unit}`)))]));
      this.list = el("dl", { hidden: true }, ...this.rows.values());
      this.element = el("aside", { class: "lens-details", "aria-live": "polite", "aria-label": "Numbers of the token" },
        el("div", { class: "lens-title" }, this.title, this.unpin), this.hint, this.list);
    }

    /** Shows a token of a card, or the hint if there is none. */
    show(card, position, pinned) {
      this.unpin.hidden = !pinned;
      this.hint.hidden = Boolean(card);
      this.list.hidden = !card;
      this.title.textContent = card ? `Rollout ${card.rollout.index} \u00b7 token ${position}${pinned ? " \u00b7 pinned" : ""}` : "Token";
      if (!card) return;
      const { rollout } = card;
      this.values.get("token").replaceChildren(inline(card.shown(position)));
      this.values.get("token").dataset.value = plain(card.shown(position));
      this.put("token_id", rollout.ids[position], String(rollout.ids[position]));
      this.put("position", position, `${position} of 0 to ${card.length - 1}`);
      const ratio = numeric(rollout.log_ratio?.[position]);
      this.put("probability_ratio", ratio === null ? null : Math.exp(ratio));
      for (const key of ["student_logprob", "teacher_logprob", "log_ratio", "reward", "return", "advantage", "importance_ratio"]) {
        this.put(key, rollout[key]?.[position]);
      }
      const clipped = numeric(rollout.clipped?.[position]);
      this.put("clipped", clipped, clipped === null ? "not stored" : clipped ? "yes" : "no");
    }

    put(field, value, text = written(value)) {
      const node = this.values.get(field);
      node.textContent = text;
      node.dataset.value = value ?? "";
      node.classList.toggle("lens-absent", numeric(value) === null);
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
      this.details = new Details(() => this.setPin(null));
      this.build(root);
      this.listen();
      this.update(data);
      if (choiceOf(location.hash)) root.scrollIntoView();
    }

    build(root) {
      this.runs = el("select", { "data-control": "run" });
      this.steps = el("select", { "data-control": "step" });
      this.prompts = el("select", { "data-control": "prompt" });
      this.runField = el("label", {}, el("span", {}, "Run"), this.runs);
      this.previous = button("\u2039", { "aria-label": "previous step" }, () => this.moveStep(-1));
      this.next = button("\u203a", { "aria-label": "next step" }, () => this.moveStep(1));
      this.stepCount = el("small");
      this.promptCount = el("small");
      this.newer = button("", { class: "lens-newer" }, () => this.choose({ step: last(this.run.steps).step }));
      this.colours = el("fieldset", { class: "lens-colours" }, el("legend", {}, "Colour by"));
      this.legend = el("div", { class: "lens-legend" });
      this.prompt = el("div", { class: "lens-prompt" });
      this.grid = el("div", { class: "lens-grid" });
      this.lists = el("div", { class: "lens-lists" });
      this.empty = el("p", { class: "lens-note" }, "There are no rollouts to show yet.");
      this.note = el("div", { role: "status" });
      this.content = el("div", {},
        el("div", { class: "lens-controls" }, this.runField,
          el("div", { class: "lens-step" }, el("label", {}, el("span", {}, "Step"), this.steps), this.previous, this.next, this.stepCount),
          el("label", { class: "lens-pick" }, el("span", {}, "Prompt"), this.prompts, this.promptCount), this.colours),
        this.note, this.legend,
        el("div", { class: "lens-body" }, el("div", { class: "lens-main" }, this.prompt, this.grid), this.details.element),
        this.lists);
      this.element = el("section", { class: "lens", "aria-label": "Token lens" }, this.empty, this.content);
      root.replaceChildren(this.element);
    }

    listen() {
      this.runs.addEventListener("change", () => this.choose({ run: this.data.runs[this.runs.value].name, step: undefined }));
      this.steps.addEventListener("change", () => this.choose({ step: Number(this.steps.value) }));
      this.prompts.addEventListener("change", () => this.choose({ group: Number(this.prompts.value) }));
      this.colours.addEventListener("change", (event) => this.choose({ colour: event.target.value }));
      this.grid.addEventListener("mouseover", (event) => this.look("pointed", event.target));
      this.grid.addEventListener("mouseleave", () => this.look("pointed", null));
      this.grid.addEventListener("focusin", (event) => this.look("focused", event.target));
      this.grid.addEventListener("focusout", () => this.look("focused", null));
      this.grid.addEventListener("click", (event) => this.press(this.find(event.target)));
      this.grid.addEventListener("keydown", (event) => this.key(event));
      this.element.addEventListener("keydown", (event) => event.key === "Escape" && this.setPin(null));
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
      const before = this.group;
      Object.assign(this.choice, change);
      if (!("colour" in change)) this.known = undefined;
      this.draw();
      if (this.group !== before) this.setPin(null);
      const { run, step, group, colour } = this.choice;
      try {
        history.replaceState(null, "", `#lens=${encodeURIComponent(run)}.${step}.${group}.${colour}`);
      } catch {
        // Some places do not let a page change its address. The lens works without.
      }
    }

    moveStep(by) {
      this.choose({ step: this.run.steps[this.run.steps.indexOf(this.step) + by].step });
    }

    /** Finds what is chosen in the data, or what is nearest to it. False if there is nothing at all. */
    settle() {
      const runs = this.data.runs.filter((run) => run.steps.some((step) => step.groups.length));
      if (!runs.length) return false;
      const { choice } = this;
      this.run = runs.find((run) => run.name === choice.run) ?? runs[0];
      const steps = this.run.steps;
      this.step = choice.step === undefined ? last(steps) : nearest(steps, "step", choice.step);
      if (!this.step.groups.length) this.step = last(steps.filter((step) => step.groups.length));
      this.group = this.step.groups.find((group) => group.index === choice.group) ?? this.step.groups[0];
      const there = this.data.streams.filter((stream) => this.has(stream));
      this.stream = there.find((stream) => stream.key === choice.colour) ?? there[0] ?? null;
      this.known ??= last(steps).step;
      Object.assign(choice, { run: this.run.name, step: this.step.step, group: this.group.index });
      choice.colour = this.stream?.key ?? choice.colour;
      return true;
    }

    has(stream) {
      return this.run.scale?.[stream.key] != null;
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
      const { run, step, group } = this;
      this.runField.hidden = this.data.runs.length < 2;
      fill(this.runs, this.data.runs.map((one, i) => [i, one.name]), this.data.runs.indexOf(run));
      fill(this.steps, run.steps.map((one) => [one.step, one.step]), step.step);
      fill(this.prompts, step.groups.map((one) => [one.index, this.summary(one)]), group.index);
      const at = run.steps.indexOf(step);
      this.previous.disabled = at === 0;
      this.next.disabled = at === run.steps.length - 1;
      const total = run.num_steps ?? last(run.steps).step;
      this.stepCount.textContent = `${run.steps.length} of ${counted(total, "step")} are in this page`;
      this.promptCount.textContent = `${step.groups.length} of ${counted(step.num_groups, "prompt")} of this step are in this page`;
      this.newer.textContent = `a newer step is there: go to step ${last(run.steps).step}`;
      if (last(run.steps).step > this.known) this.note.append(this.newer);
      else this.newer.remove();
      const radios = this.data.streams.map((stream) => el("label", {},
        el("input", { type: "radio", name: "lens-colour", value: stream.key, disabled: !this.has(stream) }), el("span", {}, stream.label)));
      if (this.colours.children.length !== radios.length + 1) this.colours.append(...radios);
      for (const radio of this.colours.querySelectorAll("input")) {
        radio.checked = radio.value === this.stream?.key;
        radio.disabled = run.scale?.[radio.value] == null;
      }
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
      const scaleRow = el("div", { class: "lens-ends" }, el("span", {}, `\u2212${end}`), el("span", {}, "0"), el("span", {}, `+${end}`));
      const floored = stream.key === "reward" && run.floor != null;
      if (floored) {
        const tick = el("span", { class: "lens-floor" }, `floor ${written(run.floor)}`);
        tick.style.setProperty("--at", Math.max(0, Math.min(1, (run.floor / scale + 1) / 2)));
        bar.append(tick);
      }
      const key = (className, sample, text) => el("li", {}, el("span", { class: `lens-token ${className}`, "aria-hidden": "true" }, sample), ` ${text}`);
      this.legend.replaceChildren(
        el("div", { class: "lens-scale" }, bar, scaleRow),
        el("div", {},
          el("p", {}, el("strong", {}, stream.label), ` in ${stream.unit}: ${stream.meaning}. Blue: ${up}. Orange: ${down}. `,
            `Colours are full at \u00b1${end}.`, floored ? ` No reward is below the floor, ${run.floor_words}.` : ""),
          el("ul", {},
            key("lens-low lens-down lens-q6", "abc", `bar below: under \u2212${written(scale / 2)}`),
            key("lens-clipped", "abc", "dots above: clipped by the update"),
            key("lens-special", "end", "special token"),
            el("li", {}, el("span", { class: "lens-mark", "aria-hidden": "true" }, "U+202E"), " no visible character"))));
    }

    /** Draws the prompt and its completions, unless they are there already. */
    drawGroup() {
      const { run, step, group } = this;
      const place = JSON.stringify([run.name, step.step, group.index]);
      const key = place + JSON.stringify(group);
      if (key === this.drawnKey) return;
      const held = place === this.drawnPlace ? this.find(document.activeElement) : null;
      const before = place === this.drawnPlace ? this.cards : new Map();
      [this.drawnKey, this.drawnPlace] = [key, place];
      this.cards = new Map(group.rollouts.map((rollout) => [rollout.index, new Card(run, rollout, before.get(rollout.index))]));
      this.prompt.replaceChildren(
        el("div", {}, el("h3", {}, "Prompt"), paragraph(group.prompt)),
        group.answer == null ? "" : el("div", {}, el("h3", {}, "Right answer"), paragraph(group.answer)),
        el("p", { class: "lens-note" }, inline([["t", group.prompt_id]]), group.domain ? " \u00b7 " : "", inline([["t", group.domain ?? ""]]),
          ` \u00b7 sampled by policy version ${group.policy_version}`));
      this.grid.replaceChildren(...[...this.cards.values()].map((card) => card.element));
      this.pointed = this.focused = null;
      if (held) this.focus(held.card.rollout.index, held.position);
    }

    drawLists() {
      const { worst, credited } = this.step;
      const list = (name, title, says, entries) => entries?.length ? el("div", {}, el("h3", {}, title), el("p", { class: "lens-note" }, says),
        el("ol", { "data-list": name }, ...entries.map((entry) => this.entry(entry)))) : "";
      this.lists.replaceChildren(
        list("worst", "Worst rejected", "The lowest log-ratios of the whole step, in nats.", worst),
        list("credited", "Most credited", "The highest advantages of the whole step, in group std.", credited));
    }

    entry(entry) {
      const place = `group ${entry.group} \u00b7 rollout ${entry.rollout} \u00b7 token ${entry.token}`;
      const go = button("", { disabled: !entry.in_page }, () => this.jump(entry));
      go.append(inline(entry.shown, { class: "lens-chip" }), el("span", { class: "lens-number" }, written(entry.value)), el("span", {}, place));
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

    look(how, node) {
      this[how] = this.find(node);
      this.showDetails();
    }

    showDetails() {
      const pinned = this.pin && this.cards.get(this.pin.rollout);
      if (this.pin && !(this.pin.position < pinned?.length)) this.pin = null;
      const token = this.pin ? { card: pinned, position: this.pin.position } : this.pointed ?? this.focused;
      this.details.show(token?.card, token?.position, Boolean(this.pin));
    }

    setPin(pin) {
      this.mark("data-pinned", false);
      this.pin = pin;
      this.mark("data-pinned", true);
      this.showDetails();
    }

    mark(name, on, { rollout, position } = this.pin ?? {}) {
      this.cards.get(rollout)?.at(position)?.toggleAttribute(name, on);
    }

    press(token) {
      if (!token) return;
      this.focus(token.card.rollout.index, token.position);
      const same = this.pin?.rollout === token.card.rollout.index && this.pin.position === token.position;
      this.setPin(same ? null : { rollout: token.card.rollout.index, position: token.position });
    }

    focus(rollout, position) {
      const card = this.cards.get(rollout);
      if (!card?.length) return;
      const goal = Math.max(0, Math.min(position, card.length - 1));
      card.reveal(goal);
      card.activate(goal);
      card.at(goal).focus();
      this.mark("data-pinned", true);
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
      else if (event.key in moves) this.focus(moves[event.key][0].rollout.index, moves[event.key][1]);
      else return;
      event.preventDefault();
    }

    /** Goes to a token of one of the lists. */
    jump(entry) {
      this.choose({ group: entry.group });
      this.focus(entry.rollout, entry.token);
      const span = this.cards.get(entry.rollout)?.at(entry.token);
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
