// Where the rows of sequences and the blocks of KV cells are. No DOM.

/** Sequences keep their rows, new ones take free rows (null): placeRows([7, 8, 9], [7, 9, 10]) is [7, 10, 9]. */
export function placeRows(rows, numbers) {
  const next = rows.map((number) => (numbers.includes(number) ? number : null));
  for (const number of numbers.filter((each) => !next.includes(each)).sort((a, b) => a - b)) {
    const free = next.indexOf(null);
    next[free < 0 ? next.length : free] = number;
  }
  return next.slice(0, next.findLastIndex((number) => number !== null) + 1);
}

/** The style of a row's colour, its hue. Nothing is told by colour alone. */
export const colourOf = (place) => ({'--h': 255 + place * 137});

/**
 * Sequences with a common prefix become neighbours: a shared segment is one block over their rows, and what follows it
 * in each of them is beside it. What only cached prefixes hold comes below.
 *
 *     [0, 10) of 1 and 2, [10, 15) of 1, [10, 12) of 2, [0, 5) cached:     1  ##########aaaaa
 *                                                                          2  ##########bb
 *                                                                             ccccc
 *
 * `place(seq_id)`: the order of the sequences; a group stands where its first one does.
 * Returns {blocks: [{segment, kind, row, rows}], rows, held}: `held` of the rows are of sequences.
 */
export function layoutCells(segments, place) {
  const keys = new Map(); // of each sequence: for each of its segments, the first place of a holder, as text
  for (const {sequences} of segments.toSorted((a, b) => a.start - b.start)) {
    const first = String.fromCharCode(1 + Math.min(...sequences.map(place)));
    for (const id of sequences) keys.set(id, (keys.get(id) ?? '') + first);
  }
  const ids = [...keys.keys()].sort((a, b) => (keys.get(a) < keys.get(b) ? -1 : 1));
  let rows = ids.length;
  let end = Infinity; // of the last cached segment; one that begins behind it is in the same row
  const blocks = segments.map((segment) => {
    const {start, tokens, sequences, cached} = segment;
    const n = sequences.length;
    const kind = cached ? 'cached' : n > 1 ? 'shared' : 'own';
    if (!cached) return {segment, kind, row: Math.min(...sequences.map((id) => ids.indexOf(id))), rows: n};
    if (start < end) rows += 1;
    end = start + tokens;
    return {segment, kind, row: rows - 1, rows: 1};
  });
  return {blocks, rows, held: ids.length};
}
