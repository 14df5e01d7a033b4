// What stands at every position of a sample after each denoise step. No page here, numbers only.

/** Steps, blocks and edits of `sample`, whose prompt has the ids `prompt`. */
function makeReplay(sample, prompt) {
  const size = sample.block_size;
  const first = Math.floor(prompt.length / size);
  const offsets = [0];
  for (const steps of sample.steps) offsets.push(offsets.at(-1) + steps);
  const drawn = sample.ids.slice();
  const edits = new Map();
  for (const [block, step, position, old, replacement] of sample.edits ?? []) {
    const index = position - prompt.length;
    if (!edits.has(index)) {
      edits.set(index, []);
      drawn[index] = old; // the first edit replaced what was drawn
    }
    edits.get(index).push({ time: offsets[block - first] + step, step, old, replacement });
  }
  return { sample, prompt, size, first, offsets, drawn, edits, total: offsets.at(-1) };
}

/** Index of the block of response token `index`, 0 for the block that the prompt ends in. */
function blockOf(replay, index) {
  return Math.floor((replay.prompt.length + index) / replay.size) - replay.first;
}

/** The step of the whole response, from 0, in which token `index` was drawn; Infinity if it never was. */
function revealTime(replay, index) {
  const step = replay.sample.reveal[index];
  return step < 0 ? Infinity : replay.offsets[blockOf(replay, index)] + step;
}

/**
 * Token `index` after `done` steps of the whole response.
 * state: "waiting" (its block has not begun), "hidden" (a mask) or "shown"; fresh, changed: drawn or edited in the
 * last of these steps; edited: replaced in one of them.
 */
function tokenAt(replay, index, done) {
  const time = revealTime(replay, index);
  if (time >= done) {
    const begun = replay.offsets[blockOf(replay, index)] <= done;
    return { state: begun ? "hidden" : "waiting", id: replay.drawn[index], fresh: false, changed: false, edited: false };
  }
  const last = (replay.edits.get(index) ?? []).filter((edit) => edit.time < done).at(-1);
  return {
    state: "shown",
    id: last ? last.replacement : replay.drawn[index],
    fresh: time === done - 1,
    changed: last !== undefined && last.time === done - 1,
    edited: last !== undefined,
  };
}

/** Block and step within it that the `done`-th step of the response is; null before the first. */
function stepAt(replay, done) {
  if (done === 0) return null;
  const block = replay.offsets.findIndex((offset, i) => offset < done && done <= replay.offsets[i + 1]);
  return { block, step: done - 1 - replay.offsets[block], steps: replay.sample.steps[block] };
}

/** Per step of the response: tokens drawn and tokens edited. */
function activity(replay) {
  const drawn = new Array(replay.total).fill(0);
  const edited = new Array(replay.total).fill(0);
  replay.sample.ids.forEach((_, index) => {
    const time = revealTime(replay, index);
    if (time < replay.total) drawn[time] += 1;
  });
  for (const list of replay.edits.values()) for (const edit of list) edited[edit.time] += 1;
  return { drawn, edited };
}

/** Mean and largest absolute difference of the drawn tokens between trainer and engine; null without the trainer's. */
function differenceOf(sample) {
  const sizes = (sample.difference ?? []).filter((d, i) => d !== null && sample.reveal[i] >= 0).map(Math.abs);
  if (!sizes.length) return null;
  const add = (sum, size) => sum + size;
  return { mean: sizes.reduce(add, 0) / sizes.length, max: sizes.reduce((a, b) => Math.max(a, b), 0) };
}
