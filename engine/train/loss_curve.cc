// Draws the loss curve as plain SVG: lines, dots and text.
#include "engine/train/loss_curve.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace baton::engine::train {
namespace {

constexpr double kWidth = 800, kHeight = 450;
constexpr double kLeft = 64, kRight = 776, kTop = 48, kBottom = 400;
constexpr int kTicks = 6;
constexpr size_t kDots = 1000;

// 1, 2 or 5 times a power of ten, so that about kTicks of them make `range`.
double tick_size(double range) {
  const double rough = std::max(range, 1e-9) / kTicks;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  for (double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough) return factor * power;
  }
  return 10 * power;
}

struct Axis {
  double low, high, at_low, at_high;
  double operator()(double value) const {
    return at_low + (value - low) / (high - low) * (at_high - at_low);
  }
};

void text(std::string& out, double x, double y, const char* anchor, std::string_view words,
          double rotate = 0) {
  absl::StrAppendFormat(&out, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\"", x, y, anchor);
  if (rotate != 0) absl::StrAppendFormat(&out, " transform=\"rotate(%g %.1f %.1f)\"", rotate, x, y);
  const std::string safe =
      absl::StrReplaceAll(std::string(words), {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}});
  absl::StrAppendFormat(&out, ">%s</text>\n", safe);
}

void grid(std::string& out, const Axis& x, const Axis& y) {
  const double step = std::max(1.0, tick_size(x.high - x.low));
  for (double value = std::ceil(x.low / step) * step; value <= x.high; value += step) {
    text(out, x(value), kBottom + 18, "middle", absl::StrFormat("%g", value));
    absl::StrAppendFormat(&out, "<path class=\"grid\" d=\"M%.1f %gV%g\"/>\n", x(value), kTop,
                          kBottom);
  }
  const double rise = tick_size(y.high - y.low);
  for (double value = std::ceil(y.low / rise) * rise; value <= y.high + rise / 100; value += rise) {
    text(out, kLeft - 8, y(value) + 4, "end", absl::StrFormat("%g", value));
    absl::StrAppendFormat(&out, "<path class=\"grid\" d=\"M%g %.1fH%g\"/>\n", kLeft, y(value),
                          kRight);
  }
  absl::StrAppendFormat(&out, "<path class=\"axis\" d=\"M%g %gV%gH%g\"/>\n", kLeft, kTop, kBottom,
                        kRight);
  text(out, (kLeft + kRight) / 2, kBottom + 38, "middle", "step");
  text(out, 18, (kTop + kBottom) / 2, "middle", "loss (nats per token)", -90);
}

}  // namespace

std::string draw_loss_curve(absl::Span<const LossPoint> points, std::string_view title) {
  std::vector<LossPoint> finite;
  for (const LossPoint& point : points) {
    if (std::isfinite(point.loss)) finite.push_back(point);
  }
  double low = 0, high = 1;
  if (!finite.empty()) {
    const auto [least, most] =
        std::minmax_element(finite.begin(), finite.end(),
                            [](const LossPoint& a, const LossPoint& b) { return a.loss < b.loss; });
    const double tick = tick_size(most->loss - least->loss);
    low = std::floor(least->loss / tick) * tick;
    high = std::max(std::ceil(most->loss / tick) * tick, low + tick);
  }
  const int first = finite.empty() ? 0 : finite.front().step;
  const int last = finite.empty() ? 1 : std::max(finite.back().step, first + 1);
  const Axis x{static_cast<double>(first), static_cast<double>(last), kLeft, kRight};
  const Axis y{low, high, kBottom, kTop};

  std::string out = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %g %g\" font-family=\"sans-serif\" "
      "font-size=\"12\">\n<style>.axis{stroke:#444;fill:none}.grid{stroke:#e4e4e4;fill:none}"
      ".dot{fill:#9ec1e0}.mean{stroke:#1f5f99;stroke-width:2;fill:none;stroke-linejoin:round}"
      ".mark{fill:#b4471f}text{fill:#222}</style>\n<rect width=\"%g\" height=\"%g\" "
      "fill=\"#fff\"/>\n",
      kWidth, kHeight, kWidth, kHeight);
  absl::StrAppendFormat(&out, "<g font-size=\"15\">");
  text(out, (kLeft + kRight) / 2, 26, "middle", title);
  out += "</g>\n";
  grid(out, x, y);

  const size_t stride = finite.size() / kDots + 1;
  for (size_t i = 0; i < finite.size(); i += stride) {
    absl::StrAppendFormat(&out, "<circle class=\"dot\" cx=\"%.1f\" cy=\"%.1f\" r=\"2\"/>\n",
                          x(finite[i].step), y(finite[i].loss));
  }
  std::string path;
  double mean = finite.empty() ? 0 : finite.front().loss;
  for (size_t i = 0; i < finite.size(); ++i) {
    mean += (finite[i].loss - mean) * std::max(0.05, 1.0 / static_cast<double>(i + 1));
    if (i % stride != 0 && i + 1 != finite.size()) continue;
    absl::StrAppendFormat(&path, "%c%.1f %.1f", path.empty() ? 'M' : 'L', x(finite[i].step),
                          y(mean));
  }
  if (!path.empty()) absl::StrAppendFormat(&out, "<path class=\"mean\" d=\"%s\"/>\n", path);
  for (const LossPoint& point : finite) {
    if (point.held_out_bits <= 0) continue;
    absl::StrAppendFormat(&out, "<circle class=\"mark\" cx=\"%.1f\" cy=\"%.1f\" r=\"4\"/>\n",
                          x(point.step), y(point.loss));
    text(out, std::min(x(point.step), kRight - 4), y(point.loss) - 10, "end",
         absl::StrFormat("%.3f bits/byte held out", point.held_out_bits));
  }
  return out + "</svg>\n";
}

}  // namespace baton::engine::train
