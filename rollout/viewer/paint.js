// Texts, numbers and colours of tokens.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SPECIAL = new Set(DATA.special);

/** `tag` with classes, text or children. */
function make(tag, className, ...content) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...content);
  return element;
}

function tokenText(id) {
  return DATA.texts ? DATA.texts[id] ?? `<${id}>` : String(id);
}

/** Plain text of some ids, without control tokens. */
function plainText(ids) {
  return DATA.texts ? ids.filter((id) => !SPECIAL.has(id)).map(tokenText).join("") : ids.join(" ");
}

const SIGNS = { " ": "·", "\n": "↵", "\t": "⇥", "\r": "␍" };

/** A sign for one character of white space, a code for a control character. */
function sign(character) {
  return SIGNS[character] ?? `\\x${character.charCodeAt(0).toString(16).padStart(2, "0")}`;
}

/** The text of a token with its white space as signs. */
function visibleText(id) {
  const text = tokenText(id);
  if (text === "") return [make("i", "", "∅")];
  const invisible = /([ \u0000-\u001f\u007f-\u00a0\u200b-\u200f\u2028\u2029\ufeff])/;
  return text.split(invisible).filter(Boolean).map((part) => (invisible.test(part) ? make("i", "", sign(part)) : part));
}

/** A number short enough to read: log-probs near 0 and differences need an exponent. */
function short(value, digits = 3) {
  if (typeof value !== "number") return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size < 1e-3 || size >= 1e6 ? value.toExponential(digits - 1) : String(Number(value.toPrecision(digits)));
  return text.replaceAll("-", "−");
}

const signed = (value) => (value > 0 ? "+" : "") + short(value);

/** Differences span orders of magnitude: 1e-6 nats and less are blank, 1 nat and more are full. */
function differenceShade(difference) {
  return Math.min(1, Math.max(0, (Math.log10(Math.max(Math.abs(difference), 1e-12)) + 6) / 6));
}

const drawn = (sample, i) => sample.reveal[i] >= 0;
const mostSteps = (sample) => sample.steps.reduce((a, b) => Math.max(a, b), 1);
const known = (value) => typeof value === "number";

/** Ways to colour: `shade(sample, i)` from 0 (blank) to 1, null for no colour; `ends` names both ends of the scale. */
const COLORS = {
  confidence: {
    label: "confidence",
    shade: (s, i) => (known(s.confidence[i]) ? 1 - s.confidence[i] : null),
    hue: () => "warm",
    ends: () => ["1 (sure)", "0 (unsure)"],
    hint: "largest probability at the step of the reveal",
  },
  reveal: {
    label: "reveal step",
    shade: (s, i) => 0.06 + (0.94 * s.reveal[i]) / Math.max(1, mostSteps(s) - 1),
    hue: () => "cool",
    ends: (s) => ["step 1", `step ${mostSteps(s)}`],
    hint: "denoise step within the block",
  },
  difference: {
    label: "trainer − engine",
    shade: (s, i) => (known(s.difference?.[i]) ? differenceShade(s.difference[i]) : null),
    hue: (s, i) => (s.difference[i] < 0 ? "cool" : "warm"),
    ends: () => ["trainer 1 nat lower", "1 nat higher"],
    both: true,
    hint: "log-prob of the drawn token; logarithmic, blank below 1e−6",
    needs: (s) => s.difference !== undefined,
  },
  probability: {
    label: "log-prob",
    shade: (s, i) => (known(s.logprob[i]) ? 1 - Math.exp(s.logprob[i]) : null),
    hue: () => "warm",
    ends: () => ["0 (certain)", "−∞ (rare)"],
    hint: "of the drawn token; linear in its probability",
  },
  none: { label: "none", shade: () => null, hue: () => "warm", ends: () => null, hint: "" },
};

/** Give `element` the colour of response token `index`. */
function paint(element, mode, sample, index, on) {
  const shade = on && drawn(sample, index) ? COLORS[mode].shade(sample, index) : null;
  element.style.setProperty("--shade", `${Math.round((shade ?? 0) * 100)}%`);
  element.dataset.hue = shade === null ? "no" : COLORS[mode].hue(sample, index);
}

/** Scale of the colours in words and a bar. */
function legend(mode, sample) {
  const ends = COLORS[mode].ends(sample);
  if (!ends) return [];
  const bar = make("span", COLORS[mode].both ? "scale both" : `scale ${COLORS[mode].hue(sample, 0)}`);
  return [ends[0], bar, ends[1], make("span", "quiet", COLORS[mode].hint)];
}

/** Rows [name, value] about response token `index`. */
function tokenRows(replay, index, done) {
  const s = replay.sample;
  const now = tokenAt(replay, index, done);
  const block = blockOf(replay, index);
  const quoted = (id) => (DATA.texts ? JSON.stringify(tokenText(id)) : String(id));
  const rows = [
    ["text", DATA.texts ? quoted(now.id) : "no tokenizer"],
    ["id", String(now.id)],
    ["position", `${replay.prompt.length + index}, block ${replay.first + block + 1}`],
  ];
  if (!drawn(s, index)) return [...rows, ["reveal step", "never drawn"]];
  rows.push(
    ["reveal step", `${s.reveal[index] + 1} of ${s.steps[block]}`],
    ["confidence", short(s.confidence[index], 5)],
    ["log-prob", short(s.logprob[index], 6)],
    ["raw log-prob", short((s.raw ?? s.logprob)[index], 6)],
  );
  if (s.trainer) rows.push([s.difference ? "trainer log-prob" : "trainer likelihood", short(s.trainer[index], 6)]);
  if (s.difference) rows.push(["difference", signed(s.difference[index])]);
  if (s.ties?.includes(index)) rows.push(["router", "depends on a tie"]);
  for (const edit of replay.edits.get(index) ?? []) {
    rows.push([`edit, step ${edit.step + 1}`, `${quoted(edit.old)} → ${quoted(edit.replacement)}`]);
  }
  if (index >= s.visible) rows.push(["note", "behind the stop: drawn, but not in the response"]);
  if (now.state !== "shown") rows.push(["note", "hidden at this step"]);
  return rows;
}
