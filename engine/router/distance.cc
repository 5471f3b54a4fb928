// Distances of places, from their paths.
#include "engine/router/distance.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/ascii.h"

namespace baton::engine::router {
namespace {

constexpr size_t kMaxPlace = 128;
constexpr int kDoublings = 6;

std::vector<std::string_view> parts_of(std::string_view place) {
  std::vector<std::string_view> parts;
  for (size_t end; (end = place.find('/')) != std::string_view::npos;
       place.remove_prefix(end + 1)) {
    parts.push_back(place.substr(0, end));
  }
  parts.push_back(place);
  return parts;
}

}  // namespace

int distance(std::string_view a, std::string_view b) {
  const std::vector<std::string_view> left = parts_of(a), right = parts_of(b);
  const auto [part, other] = std::mismatch(left.begin(), left.end(), right.begin(), right.end());
  return static_cast<int>(std::max(left.end() - part, right.end() - other));
}

double move_cost(int distance, double next_door) {
  if (distance == 0) return 0;
  return std::ldexp(next_door, std::min(distance - 1, kDoublings));
}

bool is_place(std::string_view text) {
  if (text.empty() || text.size() > kMaxPlace) return false;
  for (const std::string_view part : parts_of(text)) {
    if (part.empty()) return false;
    for (const char c : part) {
      if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) && c != '.' && c != '_' && c != '-') {
        return false;
      }
    }
  }
  return true;
}

}  // namespace baton::engine::router
