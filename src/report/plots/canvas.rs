//! From a figure to files: the font, text that is measured and wrapped, and the two formats.

use std::collections::HashMap;
use std::sync::LazyLock;

use plotters::backend::{BitMapBackend, DrawingBackend, SVGBackend};
use plotters::coord::Shift;
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color as _, FontStyle, IntoFont, RGBColor, TextStyle, WHITE, register_font};

use super::{Body, Color, Figure, INK, Plot, bars, lines};

/// Width of every picture in pixels.
pub(super) const WIDTH: u32 = 1200;
/// Space around everything.
pub(super) const MARGIN: i32 = 24;
/// Height of the title with the space below it.
pub(super) const TITLE_HEIGHT: i32 = 44;
/// Size of legends, labels and panel titles, in pixels.
pub(super) const TEXT: i32 = 17;
/// From one line of text to the next.
pub(super) const LINE_HEIGHT: i32 = 20;
/// Size of the numbers at the axes.
pub(super) const SMALL_TEXT: i32 = 15;
const TITLE_TEXT: i32 = 24;

/// The family name under which the embedded font is known; SVG viewers without it take their own sans-serif.
pub(super) const FONT: &str = "sans-serif";

/// Registers the embedded font, once.
static FONT_IS_READY: LazyLock<bool> = LazyLock::new(|| {
    register_font(FONT, FontStyle::Normal, dejavu::sans::regular()).is_ok() && register_font(FONT, FontStyle::Bold, dejavu::sans::bold()).is_ok()
});

/// The area that is drawn on, in pixels.
pub(super) type Area<B> = DrawingArea<B, Shift>;

/// What drawing ends with; the error is a sentence.
pub(super) type Drawn = Result<(), String>;

/// Renders a figure in both formats.
pub(super) fn render(figure: &Figure) -> Result<Plot, String> {
    if !*FONT_IS_READY {
        return Err("the embedded font cannot be read".to_owned());
    }
    let height = match &figure.body {
        Body::Lines { columns, panels, legend } => lines::height(*columns, panels.len(), legend),
        Body::Bars { bars, .. } => bars::height(bars),
    };
    let size = (WIDTH, height as u32);
    let mut svg = String::new();
    draw(figure, &SVGBackend::with_string(&mut svg, size).into_drawing_area())?;
    let mut pixels = vec![0; size.0 as usize * size.1 as usize * 3];
    draw(figure, &BitMapBackend::with_buffer(&mut pixels, size).into_drawing_area())?;
    Ok(Plot { name: figure.name.clone(), title: figure.title.clone(), svg, png: encode(&pixels, size)? })
}

fn draw<B: DrawingBackend>(figure: &Figure, area: &Area<B>) -> Drawn {
    area.fill(&WHITE).map_err(defect)?;
    let mut title = text_style(TITLE_TEXT, HPos::Left, VPos::Top);
    title.font = (FONT, TITLE_TEXT, FontStyle::Bold).into_font();
    area.draw_text(&figure.title, &title, (MARGIN, MARGIN - 6)).map_err(defect)?;
    match &figure.body {
        Body::Lines { columns, panels, legend } => lines::draw(area, *columns, panels, legend)?,
        Body::Bars { axis, bars } => bars::draw(area, axis, bars)?,
    }
    area.present().map_err(defect)
}

/// Encodes RGB pixels as PNG: with a palette where the picture has few enough colours, which a third of the bytes and of the time is enough for.
fn encode(pixels: &[u8], (width, height): (u32, u32)) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::Default);
    encoder.set_filter(png::FilterType::NoFilter);
    let indexed = indexed(pixels);
    encoder.set_color(if indexed.is_some() { png::ColorType::Indexed } else { png::ColorType::Rgb });
    let data = match indexed {
        Some((palette, indices)) => {
            encoder.set_palette(palette);
            std::borrow::Cow::Owned(indices)
        }
        None => std::borrow::Cow::Borrowed(pixels),
    };
    let mut writer = encoder.write_header().map_err(defect)?;
    writer.write_image_data(&data).map_err(defect)?;
    writer.finish().map_err(defect)?;
    Ok(bytes)
}

/// Palette and index of every pixel; `None` where there are more than 256 colours.
fn indexed(pixels: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let mut known: HashMap<[u8; 3], u8> = HashMap::new();
    let mut palette = Vec::new();
    let mut indices = Vec::with_capacity(pixels.len() / 3);
    // Most pixels are as the one before.
    let mut last: Option<([u8; 3], u8)> = None;
    for pixel in pixels.chunks_exact(3) {
        let pixel = [softened(pixel[0]), softened(pixel[1]), softened(pixel[2])];
        let index = match last {
            Some((color, index)) if color == pixel => index,
            _ => match known.get(&pixel) {
                Some(index) => *index,
                None => {
                    let index = u8::try_from(known.len()).ok()?;
                    known.insert(pixel, index);
                    palette.extend_from_slice(&pixel);
                    index
                }
            },
        };
        last = Some((pixel, index));
        indices.push(index);
    }
    Some((palette, indices))
}

/// The nearest of 52 shades, black and white among them: edges of letters have hundreds, which nobody tells apart.
fn softened(shade: u8) -> u8 {
    ((u16::from(shade) + 2) / 5 * 5) as u8
}

/// Turns an error of the drawing library into a sentence.
pub(super) fn defect(error: impl std::fmt::Display) -> String {
    format!("a plot could not be drawn: {error}")
}

/// A colour as plotters knows it.
pub(super) fn color((red, green, blue): Color) -> RGBColor {
    RGBColor(red, green, blue)
}

/// Style of a text of `size` pixels, anchored at `horizontal` and `vertical`.
pub(super) fn text_style(size: i32, horizontal: HPos, vertical: VPos) -> TextStyle<'static> {
    TextStyle { font: (FONT, size).into_font(), color: color(INK).to_backend_color(), pos: Pos::new(horizontal, vertical) }
}

/// Width of a text in pixels.
pub(super) fn text_width(text: &str, size: i32) -> i32 {
    (FONT, size).into_font().box_size(text).map_or(0, |(width, _)| width as i32)
}

/// Breaks a text into lines of at most `width` pixels, at spaces where there are any.
pub(super) fn wrap(text: &str, size: i32, width: i32) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split_whitespace() {
        let joined = if line.is_empty() { word.to_owned() } else { format!("{line} {word}") };
        if text_width(&joined, size) <= width {
            line = joined;
            continue;
        }
        if !line.is_empty() {
            lines.push(std::mem::take(&mut line));
        }
        // A word that is too long for a line of its own is cut.
        for character in word.chars() {
            line.push(character);
            if text_width(&line, size) > width && line.chars().count() > 1 {
                line.pop();
                lines.push(std::mem::replace(&mut line, character.to_string()));
            }
        }
    }
    if !line.is_empty() || lines.is_empty() {
        lines.push(line);
    }
    lines
}

/// As [`wrap`], with at most `most` lines; an ellipsis stands for the rest.
pub(super) fn wrap_to(text: &str, size: i32, width: i32, most: usize) -> Vec<String> {
    let mut lines = wrap(text, size, width);
    if lines.len() > most {
        lines.truncate(most);
        if let Some(last) = lines.last_mut() {
            while text_width(&format!("{last}…"), size) > width && last.pop().is_some() {}
            last.push('…');
        }
    }
    lines
}

/// A step of 1, 2 or 5 times a power of ten that divides `range` into about `parts`.
pub(super) fn nice_step(range: f64, parts: f64) -> f64 {
    let rough = range / parts;
    if !(rough.is_finite() && rough > 0.0) {
        return 1.0;
    }
    let power = 10_f64.powf(rough.log10().floor());
    let factor = match rough / power {
        ratio if ratio <= 1.0 => 1.0,
        ratio if ratio <= 2.0 => 2.0,
        ratio if ratio <= 5.0 => 5.0,
        _ => 10.0,
    };
    factor * power
}

/// A number at an axis whose ticks are `step` apart.
pub(super) fn tick(value: f64, step: f64) -> String {
    let decimals = if step >= 1.0 { 0 } else { (-step.log10()).ceil().clamp(0.0, 9.0) as usize };
    let text = format!("{value:.decimals$}");
    // Minus zero is zero.
    if text.trim_start_matches(['-', '0', '.']).is_empty() { text.trim_start_matches('-').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::{FONT_IS_READY, indexed, nice_step, text_width, tick, wrap, wrap_to};

    #[test]
    fn texts_are_wrapped_to_their_width() {
        assert!(*FONT_IS_READY);
        let label = "FSDP + full_shard + min_num_params = 2K + no-prefetch + no-use_original_params + MPT + fp16 + Gradient checkpointing";
        let lines = wrap(label, 17, 300);
        assert_eq!(lines.join(" "), label);
        assert!(lines.len() > 2 && lines.iter().all(|line| text_width(line, 17) <= 300), "{lines:?}");
        let long = "x".repeat(400);
        let lines = wrap(&long, 17, 300);
        assert_eq!(lines.concat(), long);
        assert!(lines.iter().all(|line| text_width(line, 17) <= 300));
        let short = wrap_to(label, 17, 300, 2);
        assert!(short.len() == 2 && short[1].ends_with('…') && text_width(&short[1], 17) <= 300, "{short:?}");
        assert_eq!(wrap("", 17, 300), [""]);
    }

    #[test]
    fn pictures_of_few_colours_have_a_palette() {
        let (palette, indices) = indexed(&[255, 255, 255, 255, 255, 255, 0, 114, 178, 1, 113, 179, 255, 255, 255]).unwrap();
        assert_eq!((palette, indices), (vec![255, 255, 255, 0, 115, 180], vec![0, 0, 1, 1, 0]));
        let many: Vec<u8> = (0..10_u8).flat_map(|red| (0..50_u8).flat_map(move |green| [red * 20, green * 5, 0])).collect();
        assert_eq!(indexed(&many), None);
    }

    #[test]
    fn ticks_are_round_numbers() {
        for (range, step) in [(10.0, 2.0), (1.0, 0.2), (7.0, 2.0), (1000.0, 200.0), (0.0, 1.0), (f64::NAN, 1.0)] {
            assert!((nice_step(range, 5.0) - step).abs() < 1e-12, "{range}");
        }
        assert_eq!([tick(0.30000000000000004, 0.1), tick(400.0, 200.0), tick(-0.0, 0.5)], ["0.3", "400", "0.0"]);
    }
}
