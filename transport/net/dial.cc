// Addresses of a peer in turn, and what their answers are worth.
#include "transport/net/dial.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace baton::net {

void Dial::answered_at(const Endpoint& where) {
  const auto same = [&](const Endpoint& each) {
    return each.same_host(where) && each.port() == where.port() && each.scope() == where.scope();
  };
  if (std::any_of(endpoints.begin(), endpoints.end(), same)) return;
  answered_ = where;
  endpoints.push_back(where);
}

bool Dial::at_answered() const {
  const Endpoint& at = endpoints[next - 1];
  return answered_.size > 0 && at.same_host(answered_) && at.port() == answered_.port();
}

void Dial::met() {
  if (!at_answered() || endpoints.size() == 1) return;
  endpoints = {endpoints[next - 1]};
  next = 1;
}

void Dial::met_at(const Endpoint& where) {
  met_ = where;
  const auto same = [&](const Endpoint& each) { return each.same_host(met_); };
  const auto others = std::stable_partition(endpoints.begin(), endpoints.end(), same);
  if (others != endpoints.begin() || endpoints.empty()) return;
  endpoints.insert(endpoints.begin(), met_.at_port_of(endpoints.front()));
  guess_ = true;
}

bool Dial::advance(Time now, Time patience) {
  if (until_ == kNever) until_ = now < kNever - patience ? now + patience : kNever - Time(1);
  no_.resize(endpoints.size(), absl::StatusCode::kOk);
  narrow_.resize(endpoints.size(), 0);
  while (true) {
    if (next == endpoints.size()) {
      if (any_narrow_ && narrower_ + 1 < kSegments.size()) {
        ++narrower_;
      } else if (any_silent_ && now < until_) {
        narrower_ = 0;
        any_silent_ = false;
        narrow_.assign(endpoints.size(), 0);
      } else {
        return false;
      }
      next = 0;
      any_narrow_ = false;
      again_ = true;
    }
    const size_t at = next++;
    if (no_[at] == absl::StatusCode::kOk && narrow_[at] == narrower_) return true;
  }
}

void Dial::narrow() {
  if (full_only) return;
  any_narrow_ = true;
  narrow_[next - 1] = narrower_ + 1;
}

Time Dial::patience_ends(Time now, Time patience) const {
  if (endpoints.size() < 2) return kNever;
  const bool another_answers = answered_.size > 0 && !at_answered();
  return now + patience / (another_answers ? 16 : 4);
}

void Dial::note(const absl::Status& why) {
  if (!again_) {  // enough is said the first time
    absl::StrAppend(&errors, "; ", next == 0 ? "" : endpoints[next - 1].text() + ": ",
                    why.message());
  }
  const bool refused = absl::IsPermissionDenied(why) || absl::IsFailedPrecondition(why);
  if (!refused && !absl::IsNotFound(why)) return;
  if (next > 0 && next <= no_.size()) no_[next - 1] = why.code();
  if (guessed()) return;  // another host may have that address by now
  if (refused || refusal_ == absl::StatusCode::kUnavailable) refusal_ = why.code();
  if (next > 0 && met_.size > 0 && endpoints[next - 1].same_host(met_)) its_own_ = true;
}

absl::StatusCode Dial::verdict() const {
  if (resume == Resume::kNew || its_own_) return refusal_;
  const bool everywhere = met_.size == 0 && !no_.empty() &&
                          std::all_of(no_.begin(), no_.end(), [](absl::StatusCode each) {
                            return each != absl::StatusCode::kOk;
                          });
  return everywhere ? refusal_ : absl::StatusCode::kUnavailable;
}

}  // namespace baton::net
