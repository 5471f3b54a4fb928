// Gathering the ranks of a generation: duplicates, versions, missing ranks and their answers.
#include "collectives/launch/gathering.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "transport/base/durations.h"

namespace baton::launch {

using collectives::RankInfo;

namespace {

using Messages = std::vector<std::string>;

std::shared_ptr<const Messages> refusal(const absl::Status& why) {
  return std::make_shared<const Messages>(
      Messages{encode_message(MessageType::kRefusal, encode_refusal(why))});
}

std::string describe(const RankInfo& info) {
  return absl::StrFormat("rank %u (pid %u on %s)", info.rank, info.pid, info.host);
}

}  // namespace

std::string list_ranks(const std::vector<uint32_t>& ascending) {
  constexpr size_t kMost = 16;
  std::vector<std::string> ranges;
  for (size_t i = 0; i < ascending.size();) {
    size_t end = i + 1;
    while (end < ascending.size() && ascending[end] == ascending[end - 1] + 1) ++end;
    if (ranges.size() == kMost) {
      ranges.push_back(absl::StrCat("and ", ascending.size() - i, " more"));
      break;
    }
    ranges.push_back(end - i == 1 ? absl::StrCat(ascending[i])
                                  : absl::StrCat(ascending[i], "-", ascending[end - 1]));
    i = end;
  }
  return absl::StrJoin(ranges, ", ");
}

absl::Status Gathering::check(const RankInfo& info) const {
  if (info.version != collectives::kCollectivesVersion) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s speaks version %u of the collectives, the rendezvous %u: install the same Baton "
        "everywhere",
        describe(info), info.version, collectives::kCollectivesVersion));
  }
  if (info.ranks != ranks_) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s expects %u ranks, but the rendezvous is for %u ranks: start all with the same number",
        describe(info), info.ranks, ranks_));
  }
  if (info.rank >= ranks_) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s is out of range: there are %u ranks, counted from 0", describe(info), ranks_));
  }
  if (const auto same = waiting_.find(info.rank);
      same != waiting_.end() && same->second.info.generation == info.generation) {
    const RankInfo& first = same->second.info;
    return absl::InvalidArgumentError(absl::StrFormat(
        "rank %u came twice, as pid %u on %s and as pid %u on %s: give each process its own rank",
        info.rank, first.pid, first.host, info.pid, info.host));
  }
  return absl::OkStatus();
}

void Gathering::join(ConnectionId connection, const Join& join, Time now,
                     std::vector<Answer>& answers) {
  const RankInfo& info = join.info;
  if (!closed_.ok()) {
    answers.push_back({connection, refusal(closed_)});
    return;
  }
  if (fixed_ranks_ == 0 && waiting_.empty()) ranks_ = std::min(info.ranks, kMostRanks);
  if (info.version == collectives::kCollectivesVersion && info.generation < next_) {
    answers.push_back(
        {connection, refusal(absl::FailedPreconditionError(absl::StrFormat(
                         "generation %u of this group is over: %s must come with %u or "
                         "higher, as all others of the group that replaces it "
                         "(CommunicatorOptions::generation)",
                         info.generation, describe(info), next_)))});
    return;
  }
  if (const absl::Status good = check(info); !good.ok()) {
    answers.push_back({connection, refusal(good)});
    refuse_all(good, answers);
    return;
  }
  if (info.generation > next_) {
    refuse_all(absl::FailedPreconditionError(absl::StrFormat(
                   "generation %u of this group is over: %s has begun generation %u", next_,
                   describe(info), info.generation)),
               answers);
    next_ = info.generation;
    last_failure_.clear();
  }
  waiting_[info.rank] = {connection, info, base::deadline_after(now, join.patience)};
  if (waiting_.size() < ranks_) return;

  Messages all;
  for (const auto& [rank, one] : waiting_) {
    all.push_back(encode_message(MessageType::kRankInfo, one.info.encode()));
  }
  const auto shared = std::make_shared<const Messages>(std::move(all));
  for (const auto& [rank, one] : waiting_) answers.push_back({one.connection, shared});
  waiting_.clear();
  last_failure_.clear();
  ++next_;
}

void Gathering::refuse_all(const absl::Status& why, std::vector<Answer>& answers) {
  const auto messages = refusal(why);
  for (const auto& [rank, one] : waiting_) answers.push_back({one.connection, messages});
  waiting_.clear();
  last_failure_ = std::string(why.message());
}

void Gathering::close(const std::string& why, std::vector<Answer>& answers) {
  closed_ = absl::CancelledError(why);
  refuse_all(closed_, answers);
}

void Gathering::leave(ConnectionId connection) {
  std::erase_if(waiting_, [&](const auto& entry) { return entry.second.connection == connection; });
}

void Gathering::expire(Time now, std::vector<Answer>& answers) {
  const auto gone = std::find_if(waiting_.begin(), waiting_.end(),
                                 [&](const auto& entry) { return entry.second.deadline <= now; });
  if (gone == waiting_.end()) return;
  std::vector<uint32_t> missing;
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    if (!waiting_.contains(rank)) missing.push_back(rank);
  }
  std::string what = absl::StrFormat(
      "%s %s of %u did not come to the rendezvous while %s waited: look at their output, or wait "
      "longer",
      missing.size() == 1 ? "rank" : "ranks", list_ranks(missing), ranks_,
      describe(gone->second.info));
  if (!last_failure_.empty()) absl::StrAppend(&what, " (an earlier attempt: ", last_failure_, ")");
  std::string earlier = std::exchange(last_failure_, "");
  refuse_all(absl::DeadlineExceededError(what), answers);
  if (!earlier.empty()) last_failure_ = std::move(earlier);  // the cause, not its consequence
}

Time Gathering::deadline() const {
  Time first = kNever;
  for (const auto& [rank, one] : waiting_) first = std::min(first, one.deadline);
  return first;
}

const Gathering::ConnectionId* Gathering::waiting_as(const RankInfo& info) const {
  const auto found = waiting_.find(info.rank);
  if (found == waiting_.end() || found->second.info.generation != info.generation) return nullptr;
  return &found->second.connection;
}

}  // namespace baton::launch
