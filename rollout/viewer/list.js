// The list of samples, their groups, and the filters.

const $ = (id) => document.getElementById(id);
const SAMPLES = DATA.samples;
const FILTERS = ["query", "training_step", "group", "reward_min", "reward_max", "mixed"];

window.addEventListener("error", (event) => {
  $("problem").hidden = false;
  $("problem").textContent = `This page failed: ${event.message}`;
});

SAMPLES.forEach((sample, index) => {
  sample.index = index;
  sample.key = `${sample.step ?? ""}/${sample.group}`;
});
const GROUPS = new Map(SAMPLES.map((sample) => [sample.key, []]));
for (const sample of SAMPLES) GROUPS.get(sample.key).push(sample);

const promptOf = (sample) => DATA.prompts[sample.prompt];
const responseText = (sample) => sample.text ?? plainText(sample.ids.slice(0, sample.visible));
const rewardsOf = (samples) => samples.map((s) => s.reward).filter(known);
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
const hasStep = (sample) => known(sample.step);

/** What is on the page: index of the sample, steps done, way to colour, the filtered samples, the token elements. */
const view = { sample: 0, done: 0, color: "confidence", shown: [], replay: null, elements: [], pinned: null, timer: null };

function option(value, text) {
  const made = make("option", "", String(text));
  made.value = value;
  return made;
}

function rewardPill(sample) {
  const pill = make("span", "reward", short(sample.reward));
  pill.dataset.sign = !known(sample.reward) ? "no" : sample.reward > 0 ? "yes" : "zero";
  return pill;
}

function matches(sample) {
  const value = (id) => $(id).value.trim();
  if (value("training_step") && String(sample.step) !== value("training_step")) return false;
  if (value("group") && String(sample.group) !== value("group")) return false;
  if (value("reward_min") && !(sample.reward >= Number(value("reward_min")))) return false;
  if (value("reward_max") && !(sample.reward <= Number(value("reward_max")))) return false;
  if ($("mixed").checked && new Set(rewardsOf(GROUPS.get(sample.key))).size < 2) return false;
  const query = value("query").toLowerCase();
  if (!query) return true;
  sample.haystack ??= `${plainText(promptOf(sample))}\n${responseText(sample)}`.toLowerCase();
  return sample.haystack.includes(query);
}

function groupHead(group) {
  const [first] = group;
  const rewards = rewardsOf(group);
  const name = `${hasStep(first) ? `step ${first.step} · ` : ""}group ${first.group}`;
  const line = make("div", "grouphead", make("b", "", name));
  if (rewards.length) line.append(` · mean reward ${short(mean(rewards))}`);
  line.append(make("span", "snippet", "…" + plainText(promptOf(first)).trim().slice(-46)));
  return line;
}

function sampleRow(sample) {
  const text = responseText(sample).trim() || "(empty)";
  const number = make("span", "quiet", `#${sample.index + 1}`);
  const row = make("button", "row", rewardPill(sample), make("span", "snippet", text.slice(0, 120)), number);
  row.dataset.sample = sample.index;
  return row;
}

/** Apply the filters. */
function fillList() {
  view.shown = SAMPLES.filter(matches);
  const rows = [];
  let key = null;
  for (const sample of view.shown) {
    if (sample.key !== key) rows.push(groupHead(GROUPS.get(sample.key)));
    key = sample.key;
    rows.push(sampleRow(sample));
  }
  if (!rows.length) rows.push(make("p", "quiet", "No sample passes these filters."));
  $("list").replaceChildren(...rows);
  const left = DATA.left_out ? `; ${DATA.left_out} more are not in this file` : "";
  $("count").textContent = `${view.shown.length} of ${SAMPLES.length} samples${left}`;
  markRow();
}

function markRow() {
  for (const row of $("list").querySelectorAll("[aria-current]")) row.removeAttribute("aria-current");
  const row = $("list").querySelector(`[data-sample="${view.sample}"]`);
  row?.setAttribute("aria-current", "true");
  row?.scrollIntoView({ block: "nearest" });
}

/** Groups of the chosen training step; groups of different steps have nothing in common but their numbers. */
function fillGroups() {
  const step = $("training_step").value;
  const steps = new Set(SAMPLES.map((s) => s.step));
  const before = $("group").value;
  const groups = [...GROUPS.values()].filter(([first]) => !step || String(first.step) === step);
  const listed = step || steps.size === 1 ? groups : [];
  const options = listed.map((group) => {
    const rewards = rewardsOf(group);
    const suffix = rewards.length ? ` (mean ${short(mean(rewards))})` : "";
    return option(group[0].group, `${group[0].group}${suffix}`);
  });
  $("group").replaceChildren(option("", listed.length ? "all" : "choose a step"), ...options);
  $("group").disabled = !listed.length;
  $("group").value = options.some((o) => o.value === before) ? before : "";
}

function fillFilters() {
  const steps = [...new Set(SAMPLES.filter(hasStep).map((s) => s.step))];
  $("training_step").replaceChildren(option("", "all"), ...steps.map((s) => option(s, s)));
  $("training_step").closest("label").hidden = !steps.length;
  const rewards = rewardsOf(SAMPLES);
  for (const id of ["reward_min", "reward_max", "mixed"]) $(id).closest("label").hidden = !rewards.length;
  $("reward_min").placeholder = short(rewards.reduce((a, b) => Math.min(a, b), Infinity));
  $("reward_max").placeholder = short(rewards.reduce((a, b) => Math.max(a, b), -Infinity));
}
