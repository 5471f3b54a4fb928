// A verbs rail's incoming side: completions of its own work, and messages of its peer.
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "verbs/rail.h"
#include "verbs/session.h"

namespace baton::verbs {

void VerbsRail::sent(uint32_t tag, ibv_wc_status status) {
  const bool good = status == IBV_WC_SUCCESS;
  Active* active = tag < active_.size() ? &active_[tag] : nullptr;
  if (active != nullptr) --active->outstanding;
  if (!good) {
    // Flushed work is handled when both ends have drained.
    if (status != IBV_WC_WR_FLUSH_ERR) culprit(tag, status);
    return;
  }
  if (tag == kReadyTag) {
    session_.rail_ready(*this, *sink_);
  } else if (active != nullptr && active->outstanding == 0) {
    if (active->posted) {
      finish(*active, absl::OkStatus());
    } else if (active->aborted && !half_told(*active)) {
      finish(*active, absl::CancelledError("cancelled"));
    }
  }
}

void VerbsRail::culprit(uint32_t tag, ibv_wc_status status) {
  Active* active = tag < active_.size() ? &active_[tag] : nullptr;
  const std::string where = absl::StrCat("on ", port_.name());
  const bool unanswered = status == IBV_WC_RETRY_EXC_ERR || status == IBV_WC_LOC_QP_OP_ERR;
  if (unanswered && down_until_ != kNever) return fail(went_down(), true);
  switch (status) {
    case IBV_WC_REM_ACCESS_ERR:
    case IBV_WC_REM_INV_REQ_ERR:
    case IBV_WC_REM_OP_ERR: {
      const absl::Status why = absl::PermissionDeniedError(
          absl::StrCat("the peer's adapter refused the access ", where,
                       ": the peer's region does not allow it, or was deregistered"));
      if (active == nullptr) return fail(absl::UnavailableError(why.message()), true);
      // Most likely its owner deregistered it just now: asked again, it says so itself.
      const RemoteRegion& remote = active->slice.transfer->remote;
      session_.forget({remote.index, remote.generation, remote.key});
      if (active->refused) active->failure = why;
      active->refused = true;
      return fail(absl::UnavailableError(why.message()), false);
    }
    // rdma_rxe says so when the interface refuses a packet: no fault of the work request.
    case IBV_WC_LOC_QP_OP_ERR:
      return fail(absl::UnavailableError(absl::StrFormat(
                      "this adapter could not send %s (status %u): check the link", where, status)),
                  true);
    case IBV_WC_LOC_LEN_ERR:
    case IBV_WC_LOC_PROT_ERR: {
      const absl::Status why = absl::InternalError(
          absl::StrFormat("this adapter refused a work request %s (status %u)", where, status));
      if (active != nullptr) active->failure = why;
      return fail(absl::UnavailableError(why.message()), active == nullptr);
    }
    case IBV_WC_RETRY_EXC_ERR:
      return fail(
          absl::UnavailableError(absl::StrFormat(
              "the peer did not answer %s for %d ms (%u retries): check the link and that both "
              "GIDs are on one network",
              where,
              std::chrono::duration_cast<std::chrono::milliseconds>(session_.tuning().detection())
                  .count(),
              session_.tuning().retry_count)),
          true);
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return fail(absl::UnavailableError(absl::StrCat("the peer had no receive posted ", where,
                                                      ", although it had given a credit for it")),
                  true);
    default:
      return fail(absl::UnavailableError(
                      absl::StrFormat("the queue pair failed %s (status %u)", where, status)),
                  true);
  }
}

// Its peer's adapter has been told that this came, so it counts: whether kReady's own completion is
// late, or this end broke before it had looked.
void VerbsRail::make_known() {
  if (!known_) session_.rail_ready(*this, *sink_);
}

void VerbsRail::received(std::string_view bytes) {
  ++owed_;
  make_known();
  auto message = decode_message(bytes);
  if (!message.ok()) return fail(message.status(), true);
  credits_ += message->credits;
  if (credits_ > UINT16_MAX) {
    return fail(absl::InvalidArgumentError("the peer gave more credits than it has receives"),
                true);
  }
  switch (message->kind) {
    case Kind::kArrival:
      return on_arrival(message->body);
    case Kind::kFragment:
      return on_fragment(message->body);
    case Kind::kCredit:
      return;
    case Kind::kReady:
      if (state_ == State::kConnecting) session_.rail_ready(*this, *sink_);
      return;
    default:
      if (absl::Status status = session_.on_message(*message, this, *sink_); !status.ok()) {
        fail(status, true);
      }
  }
}

void VerbsRail::on_arrival(std::string_view body) {
  auto arrival = decode_arrival(body);
  if (!arrival.ok()) return fail(arrival.status(), true);
  if (!notify_.empty()) {
    notify_.append(arrival->notify);
    arrival->notify = notify_;
  }
  sink_->arrived(*this, *arrival);
  notify_.clear();
}

void VerbsRail::on_fragment(std::string_view body) {
  uint32_t offset = 0;
  if (body.size() <= sizeof offset) {
    return fail(absl::InvalidArgumentError("the peer sent a malformed message"), true);
  }
  std::memcpy(&offset, body.data(), sizeof offset);
  body.remove_prefix(sizeof offset);
  // A transfer that was stopped leaves a beginning without an end.
  if (offset == 0) notify_.clear();
  if (offset != notify_.size() || notify_.size() + body.size() > kMaxNotification) {
    return fail(absl::InvalidArgumentError("the peer sent a notification out of order"), true);
  }
  notify_.append(body);
}

void VerbsRail::overrun() {
  fail(absl::InvalidArgumentError("the peer sent more messages than it had credits for"), true);
}

void VerbsRail::unseen(const absl::Status& why) {
  fail(absl::UnavailableError(why.message()), true);
}

void VerbsRail::counted(uint32_t immediate) {
  ++owed_;
  make_known();
  session_.counters().add(immediate >> 16, static_cast<uint16_t>(immediate), 1);
  sink_->counters_moved(*this);
}

}  // namespace baton::verbs
