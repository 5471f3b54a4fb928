// Parses the file of workers: a role and a URL on each line.
#include "engine/router/worker_list.h"

#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "engine/router/distance.h"

namespace baton::engine::router {

absl::StatusOr<ListedWorkers> parse_worker_list(std::string_view text) {
  ListedWorkers listed;
  std::set<std::string> seen;
  if (!text.empty() && text.back() != '\n') {
    return absl::InvalidArgumentError("the last line has no end: it may be half written");
  }
  int number = 0;
  for (const absl::string_view line :
       absl::StrSplit(absl::string_view(text.data(), text.size()), '\n')) {
    ++number;
    const std::vector<std::string> words =
        absl::StrSplit(line.substr(0, line.find('#')), absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (words.empty()) continue;
    const auto wrong = [&](const std::string& why) {
      return absl::InvalidArgumentError(absl::StrCat("line ", number, ": ", why));
    };
    if (words.size() < 2 || words.size() > 3 || (words[0] != "prefill" && words[0] != "decode")) {
      return wrong(
          "it must be a role, prefill or decode, a URL such as http://10.0.0.1:8001 and, if you "
          "like, a place such as rack1/host3");
    }
    absl::StatusOr<http::HttpUrl> url = http::HttpUrl::parse(words[1]);
    if (!url.ok()) return wrong(std::string(url.status().message()));
    if (!seen.insert(absl::StrCat(url->host, " ", url->port)).second) {
      return wrong(absl::StrCat(words[1], " is listed already"));
    }
    if (words.size() == 3 && !is_place(words[2])) {
      return wrong(absl::StrCat(words[2],
                                " is no place: letters, digits, . _ and -, with / between "
                                "parts from far to near, as in rack1/host3"));
    }
    const std::string place = words.size() == 3 ? words[2] : url->host;
    (words[0] == "prefill" ? listed.prefill : listed.decode).push_back({*std::move(url), place});
  }
  if (listed.decode.empty()) {
    return absl::InvalidArgumentError("it lists no decode worker: there must be one at least");
  }
  return listed;
}

}  // namespace baton::engine::router
