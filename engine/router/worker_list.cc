// Parses workers as they are listed, and the file of them.
#include "engine/router/worker_list.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "engine/files/utf8.h"

namespace baton::engine::router {

absl::StatusOr<ListedWorker> parse_worker(std::string_view text) {
  const std::vector<std::string> words =
      absl::StrSplit(view(text), absl::ByAnyChar(" \t\r,"), absl::SkipEmpty());
  ListedWorker worker;
  absl::StatusOr<http::HttpUrl> url = http::HttpUrl::parse(words.empty() ? "" : words[0]);
  if (!url.ok()) return url.status();
  worker.url = *std::move(url);
  for (size_t i = 1; i < words.size(); ++i) {
    if (!worker.place.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(words[i], " is a second place, after ", worker.place));
    }
    if (!is_place(words[i])) {
      return absl::InvalidArgumentError(absl::StrCat(
          words[i],
          " is not a place: use letters, digits, . _ and -, with / between parts from far to "
          "near, as in rack1/host3"));
    }
    worker.place = words[i];
  }
  if (worker.place.empty()) worker.place = worker.url.host;
  return worker;
}

absl::StatusOr<ListedWorkers> parse_worker_list(std::string_view text) {
  ListedWorkers listed;
  std::set<std::string> seen;
  if (!text.empty() && text.back() != '\n') {
    return absl::InvalidArgumentError("the last line has no newline: the file may be half written");
  }
  int number = 0;
  for (const absl::string_view line :
       absl::StrSplit(absl::string_view(text.data(), text.size()), '\n')) {
    ++number;
    const std::vector<std::string> words =
        absl::StrSplit(line.substr(0, line.find('#')), absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (words.empty()) continue;
    const auto wrong = [&](absl::string_view why) {
      return absl::InvalidArgumentError(absl::StrCat("line ", number, ": ", why));
    };
    if (words.size() < 2 || (words[0] != "prefill" && words[0] != "decode")) {
      return wrong(
          "it must be a role, prefill or decode, a URL such as http://10.0.0.1:8001 and, if you "
          "like, a place such as rack1/host3");
    }
    absl::StatusOr<ListedWorker> worker =
        parse_worker(absl::StrJoin(words.begin() + 1, words.end(), " "));
    if (!worker.ok()) return wrong(worker.status().message());
    if (!seen.insert(absl::StrCat(worker->url.host, " ", worker->url.port)).second) {
      return wrong(absl::StrCat(words[1], " is listed already"));
    }
    (words[0] == "prefill" ? listed.prefill : listed.decode).push_back(*std::move(worker));
  }
  if (listed.decode.empty()) {
    return absl::InvalidArgumentError("it lists no decode worker: there must be one at least");
  }
  return listed;
}

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
