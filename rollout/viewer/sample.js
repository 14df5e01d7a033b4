// One sample: its facts, its tokens in blocks, and their state at a step.

const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

function fact(name, value, title = "") {
  const item = make("div", "fact", make("dt", "", name), make("dd", "", value));
  item.title = title;
  return item;
}

/** Name and value pairs above the tokens. */
function facts(sample) {
  const steps = view.replay.total;
  const tail = sample.ids.length - sample.visible;
  const versions = [...new Set(sample.versions)];
  const items = [];
  if (known(sample.reward)) items.push(fact("reward", rewardPill(sample)));
  if (sample.truth !== undefined) items.push(fact("ground truth", sample.truth));
  for (const name of ["acc", "malformed"]) if (name in sample) items.push(fact(name, short(sample[name])));
  items.push(
    fact("weights", versions.join(", ") || "–", "version of the weights; each block names its own"),
    fact("finish", sample.finish ?? "–"),
    fact("tokens", `${sample.visible}${tail ? ` + ${tail} behind the stop` : ""}`),
    fact("denoise steps", `${steps} in ${plural(sample.steps.length, "block")} of ${sample.block_size}`),
    fact("tokens per step", short(sample.ids.length / Math.max(1, steps))),
  );
  if (sample.edits) items.push(fact("edits", String(sample.edits.length)));
  const difference = differenceOf(sample);
  if (difference) {
    const title = "log-prob of the drawn tokens, in nats";
    items.push(fact("|trainer − engine|", `mean ${short(difference.mean)}, max ${short(difference.max)}`, title));
  }
  const sampling = Object.entries(sample.sampling).map(([name, value]) => `${name} ${value}`);
  if (sample.seed) sampling.push(`seed ${sample.seed}`);
  items.push(fact("sampling", sampling.join(", ")));
  return items;
}

/** A button for each sample of the group. */
function siblings(sample) {
  const group = GROUPS.get(sample.key);
  if (group.length < 2) return [];
  const buttons = group.map((other) => {
    const button = make("button", "sibling", rewardPill(other));
    button.dataset.sample = other.index;
    button.title = `#${other.index + 1}: ${responseText(other).slice(0, 200)}`;
    button.setAttribute("aria-label", `sample ${other.index + 1}, reward ${other.reward ?? "unknown"}`);
    if (other === sample) button.setAttribute("aria-current", "true");
    return button;
  });
  return [make("span", "quiet", `group of ${group.length}`), ...buttons];
}

/** Legend of the marks that this sample has. */
function marks(sample) {
  const mark = (className, text) => make("span", "mark", make("span", `t ${className}`, make("span", "x", "ab")), ` ${text}`);
  const items = [mark("hidden", "hidden (mask)")];
  if (sample.steps.length > 1) items.push(mark("waiting", "block not begun"));
  items.push(mark("fresh", "drawn in this step"), mark("given", "prompt"));
  if (sample.edits) items.push(mark("changed edited", "edited in this step"), mark("edited", "edited before"));
  if (sample.ids.length > sample.visible) items.push(mark("tail", "behind the stop"));
  if (DATA.special.length) items.push(mark("special", "control token"));
  return items;
}

// Tokens

function tokenElement(id, className) {
  const element = make("span", `t ${className}`, make("span", "x", ...visibleText(id)));
  element.classList.toggle("special", SPECIAL.has(id));
  return element;
}

function addToken(line, element, id) {
  line.append(element);
  if (DATA.texts && tokenText(id).endsWith("\n")) line.append(make("br"));
}

function givenToken(id, position) {
  const element = tokenElement(id, "given");
  element.title = `prompt, position ${position}, id ${id}`;
  return element;
}

function stopMark(sample) {
  const mark = make("span", "stop", "end");
  mark.title = `the response ends here (${sample.finish ?? "unknown reason"}); what follows was drawn with its block`;
  return mark;
}

function blockBox(caption, name) {
  const line = make("div", "line");
  const head = make("div", "caption", make("b", "", name), caption.map((part) => ` · ${part}`).join(""));
  head.title = head.textContent;
  return { box: make("div", "block", head, line), line };
}

/** The complete blocks of the prompt in one box, with a dashed line at each boundary. */
function promptBox(replay) {
  const count = replay.first * replay.size;
  const { box, line } = blockBox([`${plural(replay.first, "complete block")} of ${replay.size}`], "prompt");
  box.classList.add("prompt");
  replay.prompt.slice(0, count).forEach((id, position) => {
    if (position && position % replay.size === 0) line.append(make("span", "edge"));
    addToken(line, givenToken(id, position), id);
  });
  return box;
}

function decodedBox(replay, block) {
  const start = (replay.first + block) * replay.size;
  const given = Math.max(0, replay.prompt.length - start);
  const caption = [`positions ${start}–${start + replay.size - 1}`, plural(replay.sample.steps[block], "step")];
  if (given) caption.push(`${given} given by the prompt`);
  caption.push(`weights ${replay.sample.versions[block]}`);
  const { box, line } = blockBox(caption, `block ${replay.first + block + 1}`);
  box.dataset.block = block;
  for (let position = start; position < start + replay.size; position += 1) {
    const index = position - replay.prompt.length;
    if (index >= replay.sample.ids.length) break;
    if (index < 0) {
      addToken(line, givenToken(replay.prompt[position], position), replay.prompt[position]);
      continue;
    }
    if (index === replay.sample.visible) line.append(stopMark(replay.sample));
    const element = tokenElement(replay.drawn[index], index < replay.sample.visible ? "drawn" : "drawn tail");
    element.dataset.token = index;
    view.elements.push({ element, id: replay.drawn[index] });
    addToken(line, element, replay.sample.ids[index]);
  }
  return box;
}

function drawTokens() {
  view.elements = [];
  const boxes = view.replay.sample.steps.map((_, block) => decodedBox(view.replay, block));
  if (view.replay.first) boxes.unshift(promptBox(view.replay));
  $("tokens").replaceChildren(...boxes);
}

/** Tokens drawn and edited per step, over the slider. */
function drawBars() {
  const { drawn: counts, edited } = activity(view.replay);
  const top = counts.reduce((most, count, i) => Math.max(most, count + edited[i]), 1);
  const parts = [];
  const bar = (kind, step, from, to) =>
    `<rect class="${kind}" data-bar="${step}" x="${step + 0.08}" width="0.84" y="${1 - to / top}" height="${(to - from) / top}"/>`;
  counts.forEach((count, step) => {
    parts.push(bar("counts", step, 0, count));
    if (edited[step]) parts.push(bar("edits", step, count, count + edited[step]));
  });
  for (const at of view.replay.offsets.slice(1, -1)) parts.push(`<line x1="${at}" x2="${at}" y1="0" y2="1"/>`);
  $("bars").setAttribute("viewBox", `0 0 ${Math.max(1, view.replay.total)} 1`);
  $("bars").innerHTML = parts.join("");
}

function statusText(now) {
  const { replay, done } = view;
  const count = (test) => now.filter(test).length;
  const hidden = count((token) => token.state !== "shown");
  const at = stepAt(replay, done);
  if (!at) return `Before the first of ${plural(replay.total, "step")}: ${hidden} tokens hidden.`;
  const changed = count((token) => token.changed);
  const parts = [`${count((token) => token.fresh)} drawn`, ...(changed ? [`${changed} edited`] : []), `${hidden} hidden`];
  const choice = replay.sample.select?.[at.block]?.[at.step];
  if (choice !== undefined) parts.push(`log-prob of the choice of positions ${short(choice)}`);
  return `Step ${done} of ${replay.total} (block ${replay.first + at.block + 1}, step ${at.step + 1} of ${at.steps}): ${parts.join(", ")}.`;
}

/** Bring every token to the state after `view.done` steps. */
function drawStep() {
  const { replay, done } = view;
  const now = view.elements.map((item, index) => {
    const token = tokenAt(replay, index, done);
    const { element } = item;
    if (token.id !== item.id) {
      element.firstChild.replaceChildren(...visibleText(token.id));
      element.classList.toggle("special", SPECIAL.has(token.id));
      item.id = token.id;
    }
    for (const name of ["hidden", "waiting"]) element.classList.toggle(name, token.state === name);
    for (const name of ["fresh", "changed", "edited"]) element.classList.toggle(name, token[name]);
    paint(element, view.color, replay.sample, index, token.state === "shown");
    return token;
  });
  const current = stepAt(replay, Math.max(done, 1))?.block;
  for (const box of $("tokens").querySelectorAll("[data-block]")) {
    box.classList.toggle("current", Number(box.dataset.block) === current);
  }
  for (const bar of $("bars").querySelectorAll("[data-bar]")) bar.classList.toggle("ahead", Number(bar.dataset.bar) >= done);
  $("slider").value = done;
  $("status").textContent = statusText(now);
  $("slider").setAttribute("aria-valuetext", $("status").textContent);
  if (view.pinned !== null) showTip(view.pinned);
}

function showColor() {
  const usable = Object.keys(COLORS).filter((mode) => COLORS[mode].needs?.(view.replay.sample) ?? true);
  const mode = usable.includes(view.color) ? view.color : "confidence";
  view.color = mode;
  $("color").replaceChildren(...usable.map((name) => option(name, COLORS[name].label)));
  $("color").value = mode;
  $("legend").replaceChildren(...legend(mode, view.replay.sample));
  drawStep();
}
