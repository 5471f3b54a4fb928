// Parses the file of workers.
#include "engine/router/worker_list.h"

#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace baton::engine::router {

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
      return wrong("it must be a role, prefill or decode, and a URL such as http://10.0.0.1:8001");
    }
    if (words.size() > 2) {
      return wrong(absl::StrCat("nothing may stand behind the URL: remove ", words[2]));
    }
    absl::StatusOr<http::HttpUrl> worker = http::HttpUrl::parse(words[1]);
    if (!worker.ok()) return wrong(worker.status().message());
    if (!seen.insert(absl::StrCat(worker->host, " ", worker->port)).second) {
      return wrong(absl::StrCat(words[1], " is listed already"));
    }
    (words[0] == "prefill" ? listed.prefill : listed.decode).push_back(*std::move(worker));
  }
  if (listed.decode.empty()) {
    return absl::InvalidArgumentError("it lists no decode worker: there must be one at least");
  }
  return listed;
}

}  // namespace baton::engine::router
