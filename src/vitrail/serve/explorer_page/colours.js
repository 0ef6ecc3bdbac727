// Colour maps that can be told apart with any colour vision: viridis for amounts, purple to orange for values with a sign.

const VIRIDIS =
  "440154470d6048186a482374472d7b4537814240863e49893b528b375b8d33638d2f6b8e2c728e297a8e26828e23898e21918c1f988b1fa08822a78528ae8032b67a3fbc734ec36b5ec96270cf5784d44b98d83eaddc30c2df23d8e219ece51bfde725";
const PURPLE_ORANGE = "2d004b4518715f3a917b6aa89990bfb7b1d5cfcfe5e4e5f0f7f7f6fce8cdfed59ffdbc6bee9b39d97b12bd61099e4c077f3b08";

const AMOUNT = table(VIRIDIS);
const SIGNED = table(PURPLE_ORANGE);

function table(text) {
  const nodes = text.match(/../g).map((pair) => parseInt(pair, 16));
  const count = nodes.length / 3;
  const colours = new Uint8ClampedArray(3 * 256);
  for (let k = 0; k < 256; k++) {
    const place = (k / 255) * (count - 1);
    const low = Math.min(Math.floor(place), count - 2);
    for (let c = 0; c < 3; c++) colours[3 * k + c] = nodes[3 * low + c] + (place - low) * (nodes[3 * low + 3 + c] - nodes[3 * low + c]);
  }
  return colours;
}

// The same colours as numbers for the pixels of an image, which is much faster than one call per pixel.
export const PIXELS = Uint32Array.from({ length: 256 }, (_, k) => {
  const bytes = new Uint8ClampedArray([AMOUNT[3 * k], AMOUNT[3 * k + 1], AMOUNT[3 * k + 2], 255]);
  return new Uint32Array(bytes.buffer)[0];
});

// Place of a value on its scale, from 0 to 1.
export function fraction(value, scale) {
  const range = scale.high - scale.low;
  return range > 0 ? Math.min(1, Math.max(0, (value - scale.low) / range)) : 0;
}

export function colourOf(place, signed) {
  const colours = signed ? SIGNED : AMOUNT;
  const k = 3 * Math.round(255 * place);
  return [colours[k], colours[k + 1], colours[k + 2]];
}

export function css([r, g, b], alpha = 1) {
  return `rgba(${r}, ${g}, ${b}, ${alpha})`;
}

// How much of the photo is left where a map is drawn as light: never nothing, so that one sees where things are.
export function lightAt(place) {
  return 1 - 0.86 * (1 - place ** 0.6);
}

// The colour that stands for a place on the scale, as the legend shows it.
export function legendColour(place, signed, style) {
  const grey = Math.round(255 * lightAt(place));
  return css(style === "light" && !signed ? [grey, grey, grey] : colourOf(place, signed));
}

// Black or white text, whichever has more contrast on a colour (luminance as in WCAG).
export function inkOn(colour) {
  const [r, g, b] = colour.map((value) => (value <= 10 ? value / 3295 : ((value / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
}
