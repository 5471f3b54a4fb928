// Which worker a request goes to, and workers that go down and come back.
#include "engine/router/workers.h"

#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "transport/base/log.h"

namespace baton::engine::router {
namespace {

// So often a worker that has never answered is looked at before the log says that it does not.
constexpr int kLooksAtStart = 10;

bool contains(std::span<const size_t> list, size_t worker) {
  return std::find(list.begin(), list.end(), worker) != list.end();
}

}  // namespace

PromptKey prompt_key(std::string_view bytes, size_t tokens) {
  constexpr size_t kPiece = 256;
  constexpr size_t kPieces = 64;
  PromptKey key{.chain = {}, .tokens = tokens};
  size_t before = 0;
  for (size_t at = 0; at + kPiece <= bytes.size() && key.chain.size() < kPieces; at += kPiece) {
    before = absl::HashOf(before, absl::string_view(bytes.data() + at, kPiece));
    key.chain.push_back(before);
  }
  return key;
}

size_t WorkerGroup::present() const {
  return static_cast<size_t>(
      std::count_if(begin(), end(), [](const KnownWorker& worker) { return !worker.gone; }));
}

size_t WorkerGroup::add(http::HttpUrl url) {
  KnownWorker& worker = workers_.emplace_back();
  worker.url = std::move(url);
  worker.up = false;
  worker.why_down = "it has not been asked yet";
  return size() - 1;
}

std::vector<size_t> WorkerGroup::usable(std::span<const size_t> avoid, const std::string& model,
                                        bool resume) const {
  std::vector<size_t> best;
  int rank = 0;
  for (size_t i = 0; i < size(); ++i) {
    const KnownWorker& worker = workers_[i];
    if (!worker.fits(model, resume)) continue;
    const int own = 1 + (worker.up ? 2 : 0) + (contains(avoid, i) ? 0 : 1);
    if (own > rank) best.clear();
    rank = std::max(rank, own);
    if (own == rank) best.push_back(i);
  }
  return best;
}

std::optional<size_t> WorkerGroup::pick(const PromptKey& key, std::span<const size_t> avoid,
                                        const std::string& model, bool resume) {
  const std::vector<size_t> candidates = usable(avoid, model, resume);
  if (candidates.empty()) return std::nullopt;
  size_t best = *std::min_element(candidates.begin(), candidates.end(), [&](size_t a, size_t b) {
    return std::tie(workers_[a].in_flight, workers_[a].given) <
           std::tie(workers_[b].in_flight, workers_[b].given);
  });
  for (size_t i = key.chain.size(); i-- > 0;) {
    const auto it = prefixes_.find(key.chain[i]);
    if (it == prefixes_.end()) continue;
    if (contains(candidates, it->second) &&
        workers_[it->second].in_flight <= workers_[best].in_flight + kSlack) {
      best = it->second;
    }
    break;
  }
  if (prefixes_.size() > kMaxPrefixes) prefixes_.clear();
  for (const size_t hash : key.chain) prefixes_[hash] = best;
  workers_[best].given += key.chain.size() + 1;
  ++workers_[best].in_flight;
  return best;
}

bool WorkerGroup::has_other(std::span<const size_t> avoid, const std::string& model) const {
  for (size_t i = 0; i < size(); ++i) {
    if (workers_[i].up && workers_[i].fits(model, false) && !contains(avoid, i)) return true;
  }
  return false;
}

void WorkerGroup::catch_up(size_t worker) {
  size_t least = SIZE_MAX;
  for (const KnownWorker& other : workers_) {
    if (!other.gone && other.up) least = std::min(least, other.given);
  }
  if (least != SIZE_MAX) workers_[worker].given = std::max(workers_[worker].given, least);
}

void Workers::set_down(WorkerGroup& group, size_t index, std::string why) {
  KnownWorker& worker = group[index];
  worker.why_down = std::move(why);
  if (worker.up && worker.answered) worker.down_at = Clock::steady().now();
  worker.up = false;
  // Servers that are started together do not answer at once.
  if (!worker.answered && ++worker.looks < kLooksAtStart) return;
  if (std::exchange(worker.told, true)) return;
  base::log_event(base::LogLevel::kWarning, "router: %s worker %s is not used: %s", group.role,
                  worker.name(), worker.why_down);
}

void Workers::set_up(WorkerGroup& group, size_t index) {
  KnownWorker& worker = group[index];
  if (!worker.up) group.catch_up(index);
  const bool was_up = std::exchange(worker.up, true);
  const bool first = !std::exchange(worker.answered, true);
  const bool told = std::exchange(worker.told, false);
  if (!told && was_up && !first) return;
  base::log_event(told ? base::LogLevel::kWarning : base::LogLevel::kInfo,
                  "router: %s worker %s is used%s", group.role, worker.name(),
                  told && !first ? " again" : "");
}

Workers::Hope Workers::hope(const std::string& model, bool resume, Time now) const {
  Hope best = Hope::kNone;
  for (const KnownWorker& worker : decode) {
    if (!worker.fits(model, resume)) continue;
    if (worker.up) return Hope::kNow;
    if (worker.answered && now - worker.down_at < comeback) best = Hope::kSoon;
  }
  return best;
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
