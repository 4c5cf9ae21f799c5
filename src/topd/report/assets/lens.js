/* The token lens: which tokens did the teacher reject, and what credit did they get? */

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
    this.radios = []; // one per stream of the run
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
    this.runField = el("label", { class: "lens-run" }, el("span", {}, "Run"), this.runs);
    this.previous = button("\u2039", { "aria-label": "previous step" }, () => this.moveStep(-1));
    this.next = button("\u203a", { "aria-label": "next step" }, () => this.moveStep(1));
    this.stepCount = el("small");
    this.promptCount = el("small");
    this.newer = button("", { class: "lens-newer" }, () => this.choose({ step: last(this.stepList).step }));
    this.colours = el("fieldset", { class: "lens-colours" });
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
      ?? this.step.groups.find((group) => group.index === this.step.worst?.[0]?.group) ?? this.step.groups[0];
    this.there = this.run.streams.filter((stream) => this.run.scale?.[stream.key] != null);
    this.stream = this.there.find((stream) => stream.key === choice.colour) ?? this.there[0] ?? null;
    this.known ??= last(this.stepList).step; // The newest step when the reader last chose one.
    Object.assign(choice, { run: this.run.name, step: this.step.step, group: this.group.index });
    choice.colour = this.stream?.key ?? choice.colour;
    return true;
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
    this.drawColours();
  }

  /** One radio button per stream that the run has; those that are there stay, for the focus is on one of them. */
  drawColours() {
    const streams = this.there;
    if (streams.map(({ key }) => key).join() !== this.radios.map(({ value }) => value).join()) {
      this.radios = streams.map(({ key }) => el("input", { type: "radio", name: "lens-colour", value: key }));
      const labels = streams.map(({ label }, i) => el("label", {}, this.radios[i], el("span", {}, label)));
      this.colours.replaceChildren(el("legend", {}, "Colour by"), ...labels);
    }
    this.colours.hidden = !streams.length;
    for (const radio of this.radios) radio.checked = radio.value === this.stream?.key;
  }

  summary(group) {
    const start = plain(group.prompt).trim();
    const right = group.rollouts.filter((rollout) => rollout.grade === 1).length;
    const cut = start.length > 40 ? `${Array.from(start).slice(0, 40).join("")}\u2026` : start;
    const outcome = group.answer === null ? "not graded" : `${right}/${group.rollouts.length} right`;
    return `${group.index}: \u2068${cut}\u2069 \u2014 ${outcome}`;
  }

  drawLegend() {
    const { run, stream } = this;
    this.details.choose(run, stream?.key);
    if (!stream) {
      this.legend.replaceChildren(el("p", {}, "This run stored no numbers of its tokens, so there is nothing to colour by."));
      return;
    }
    this.legend.replaceChildren(...legendOf(run, stream));
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
    const list = (name, key, title, says) => {
      const entries = this.step[name] ?? [];
      const unit = this.run.streams.find((stream) => stream.key === key)?.unit;
      return entries.length ? [el("div", {},
        el("h3", {}, title), el("p", { class: "lens-note" }, `${says} of the whole step${unit ? ` (${unit})` : ""}.`),
        el("ol", { "data-list": name }, ...entries.map((entry) => this.entry(entry))))] : [];
    };
    this.lists.replaceChildren(
      ...list("worst", "log_ratio", "Worst rejected", "The lowest log-ratios"),
      ...list("credited", "advantage", "Most credited", "The highest advantages"));
  }

  entry(entry) {
    const place = `group ${entry.group} \u00b7 rollout ${entry.rollout} \u00b7 token ${entry.token}`;
    const go = button("", { disabled: !entry.in_page }, () => this.jump(entry));
    const value = el("span", { class: "lens-number" }, written(entry.value));
    go.append(inline(entry.shown, { class: "lens-chip" }), value, el("span", {}, place));
    if (entry.in_page) return el("li", {}, go);
    const command = `topd explain ${shellWord(this.run.path)} --step ${this.step.step} --group ${entry.group}`;
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
