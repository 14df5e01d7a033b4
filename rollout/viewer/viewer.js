// What a person does: choosing, stepping, hovering. The address (#sample=4&step=2) holds what is shown.

function showSample(index, done) {
  view.sample = Math.min(Math.max(0, index), SAMPLES.length - 1);
  const sample = SAMPLES[view.sample];
  view.replay = makeReplay(sample, promptOf(sample));
  view.done = Math.min(done ?? view.replay.total, view.replay.total);
  unpin();
  const step = hasStep(sample) ? `training step ${sample.step} · ` : "";
  $("name").textContent = `#${sample.index + 1} · ${step}group ${sample.group}`;
  $("name").title = sample.uid ? `uid ${sample.uid}` : "";
  $("facts").replaceChildren(...facts(sample));
  $("siblings").replaceChildren(...siblings(sample));
  $("slider").max = view.replay.total;
  $("marks").replaceChildren(...marks(sample));
  drawTokens();
  drawBars();
  showColor();
  markRow();
  keepAddress();
}

function showStep(done) {
  view.done = Math.min(Math.max(0, done), view.replay.total);
  drawStep();
  keepAddress();
}

/** The sample `by` places further in the filtered list. */
function moveSample(by) {
  if (!view.shown.length) return;
  const at = view.shown.findIndex((s) => s.index === view.sample);
  const next = at < 0 ? 0 : Math.min(Math.max(0, at + by), view.shown.length - 1);
  if (view.shown[next].index !== view.sample) showSample(view.shown[next].index);
}

function play() {
  if (view.timer !== null) return stop();
  if (view.done >= view.replay.total) showStep(0);
  $("play").textContent = "■ pause";
  $("play").setAttribute("aria-label", "pause");
  view.timer = setInterval(() => {
    showStep(view.done + 1);
    if (view.done >= view.replay.total) stop();
  }, Math.min(500, Math.max(40, 12000 / view.replay.total)));
}

function stop() {
  clearInterval(view.timer);
  view.timer = null;
  $("play").textContent = "▶ play";
  $("play").setAttribute("aria-label", "play");
}

// ---- the address

let addressTimer = null;

function addressOf() {
  const parts = new URLSearchParams({ sample: view.sample + 1, step: view.done, color: view.color });
  for (const id of FILTERS) {
    const value = id === "mixed" ? ($(id).checked ? "1" : "") : $(id).value.trim();
    if (value) parts.set(id, value);
  }
  return `#${parts}`;
}

/** Write the state into the address, a moment later: browsers refuse many changes a second. */
function keepAddress() {
  clearTimeout(addressTimer);
  addressTimer = setTimeout(() => {
    if (location.hash !== addressOf()) location.replace(addressOf());
  }, 200);
}

function readAddress() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const number = (name) => (/^\d+$/.test(parts.get(name) ?? "") ? Number(parts.get(name)) : undefined);
  $("training_step").value = parts.get("training_step") ?? "";
  fillGroups();
  for (const id of ["query", "group", "reward_min", "reward_max"]) $(id).value = parts.get(id) ?? "";
  $("mixed").checked = parts.get("mixed") === "1";
  if (COLORS[parts.get("color")]) view.color = parts.get("color");
  fillList();
  const first = view.shown[0]?.index ?? 0;
  showSample(number("sample") === undefined ? first : number("sample") - 1, number("step"));
}

// ---- numbers of a token

function showTip(index) {
  const { element } = view.elements[index];
  const table = make("table", "", ...tokenRows(view.replay, index, view.done).map(([name, value]) => make("tr", "", make("th", "", name), make("td", "", value))));
  const tip = $("tip");
  tip.replaceChildren(table);
  tip.hidden = false;
  const token = element.getBoundingClientRect();
  const box = tip.getBoundingClientRect();
  const above = token.bottom + box.height + 8 > innerHeight && token.top > box.height + 8;
  tip.style.left = `${Math.max(4, Math.min(token.left, innerWidth - box.width - 8)) + scrollX}px`;
  tip.style.top = `${(above ? token.top - box.height - 6 : token.bottom + 6) + scrollY}px`;
}

function unpin() {
  if (view.pinned !== null) view.elements[view.pinned]?.element.classList.remove("pinned");
  view.pinned = null;
  $("tip").hidden = true;
}

const tokenAtPointer = (event) => {
  const element = event.target.closest?.("[data-token]");
  return element ? Number(element.dataset.token) : null;
};

$("tokens").addEventListener("mouseover", (event) => {
  const index = tokenAtPointer(event);
  if (view.pinned !== null) return;
  if (index === null) $("tip").hidden = true;
  else showTip(index);
});
$("tokens").addEventListener("mouseleave", () => {
  if (view.pinned === null) $("tip").hidden = true;
});
$("tokens").addEventListener("click", (event) => {
  const index = tokenAtPointer(event);
  const again = index === view.pinned;
  unpin();
  if (index === null || again) return;
  view.pinned = index;
  view.elements[index].element.classList.add("pinned");
  showTip(index);
});

// ---- events

for (const id of ["list", "siblings"]) {
  $(id).addEventListener("click", (event) => {
    const row = event.target.closest("[data-sample]");
    if (row) showSample(Number(row.dataset.sample));
  });
}
for (const id of FILTERS) {
  $(id).addEventListener("input", () => {
    if (id === "training_step") fillGroups();
    fillList();
    if (view.shown.length && !view.shown.some((s) => s.index === view.sample)) showSample(view.shown[0].index);
    keepAddress();
  });
}
$("color").addEventListener("input", () => chooseColor($("color").value));
$("slider").addEventListener("input", () => showStep(Number($("slider").value)));
$("start").addEventListener("click", () => showStep(0));
$("back").addEventListener("click", () => showStep(view.done - 1));
$("forward").addEventListener("click", () => showStep(view.done + 1));
$("end").addEventListener("click", () => showStep(view.replay.total));
$("bars").addEventListener("click", (event) => {
  const bar = event.target.closest("[data-bar]");
  if (bar) showStep(Number(bar.dataset.bar) + 1);
});
$("play").addEventListener("click", play);

function chooseColor(mode) {
  view.color = mode;
  showColor();
  keepAddress();
}

function nextColor() {
  const modes = [...$("color").options].map((o) => o.value);
  chooseColor(modes[(modes.indexOf(view.color) + 1) % modes.length]);
}

const KEYS = {
  ArrowLeft: () => showStep(view.done - 1),
  ArrowRight: () => showStep(view.done + 1),
  ArrowUp: () => moveSample(-1),
  ArrowDown: () => moveSample(1),
  Home: () => showStep(0),
  End: () => showStep(view.replay.total),
  Escape: unpin,
  c: nextColor,
  " ": play,
};

document.addEventListener("keydown", (event) => {
  const { target } = event;
  const typing = target.matches?.("select, input:not([type=range]):not([type=checkbox])");
  const pressing = event.key === " " && target.matches?.("button, input[type=checkbox]");
  if (typing || pressing || event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  event.preventDefault();
  if (view.timer !== null && event.key !== " ") stop();
  KEYS[event.key]();
});
window.addEventListener("hashchange", () => {
  if (location.hash !== addressOf()) readAddress();
});

fillFilters();
readAddress();
