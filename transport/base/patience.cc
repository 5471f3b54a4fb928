// Reads BATON_PATIENCE.
#include "transport/base/patience.h"

#include <cstdlib>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace baton::base {
namespace {

constexpr int kMost = 1000;

const absl::StatusOr<int>& factor() {
  static const absl::StatusOr<int> read = [] {
    const char* text = std::getenv("BATON_PATIENCE");
    return parse_patience(text == nullptr ? "" : text);
  }();
  return read;
}

}  // namespace

absl::StatusOr<int> parse_patience(std::string_view text) {
  if (text.empty()) return 1;
  int factor = 0;
  if (absl::SimpleAtoi(std::string(text), &factor) && factor >= 1 && factor <= kMost) return factor;
  return absl::InvalidArgumentError(absl::StrCat("BATON_PATIENCE=", std::string(text),
                                                 ": give a whole number from 1 to ", kMost));
}

int patience_factor() { return factor().value_or(1); }

absl::Status patience_status() { return factor().status(); }

}  // namespace baton::base
