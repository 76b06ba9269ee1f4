// Unpacks sections of the page, which html.py writes as base64 of deflated bytes.
// html.py joins all files of this folder, in the order of its `_SCRIPTS`, into one async function.
const section = (id) => document.getElementById(id);

if (typeof DecompressionStream === "undefined") {
  section("needs").hidden = false;
  return;
}

async function unpackedBytes(id) {
  const packed = atob(section(id).textContent.trim());
  const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const textOf = (bytes) => new TextDecoder().decode(bytes);

async function unpackedText(id) {
  return textOf(await unpackedBytes(id));
}

// Unpacks {about, columns}; columns are arrays of numbers, with -1 for missing numbers.
async function unpackedColumns(id) {
  const bytes = await unpackedBytes(id);
  let at = bytes.indexOf(10) + 1;
  const { about, columns: heads } = JSON.parse(textOf(bytes.subarray(0, at)));
  const columns = {};
  for (const [name, length, width] of heads) {
    const values = new Float64Array(length).fill(-1);
    for (let rank = 0, scale = 1; rank < width; rank += 1, scale *= 256)
      for (let row = 0; row < length; row += 1) values[row] += bytes[at++] * scale;
    columns[name] = values;
  }
  return { about, columns };
}

// Running sums, for columns that contain differences.
function summed(steps) {
  const sums = new Float64Array(steps.length);
  let sum = 0;
  for (let row = 0; row < steps.length; row += 1) sums[row] = sum += steps[row];
  return sums;
}

const report = JSON.parse(await unpackedText("report"));
