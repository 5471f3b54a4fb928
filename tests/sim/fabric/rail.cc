// Feeds slices to the queue pair, repeats them after a refused access, gives them back when the
// rail is lost.
#include "tests/sim/fabric/rail.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/sim/fabric/network.h"
#include "tests/sim/fabric/provider.h"

namespace baton::sim {

SimRail::SimRail(SimProvider& provider, size_t peer_node, const HelloInfo& peer, bool dialled)
    : provider_(provider),
      peer_node_(peer_node),
      peer_uid_(peer.uid),
      session_(peer.session),
      index_(peer.rail),
      dialled_(dialled),
      queue_pair_(provider.network(), provider.node(), peer_node, peer.rail, provider.regions(),
                  *this) {
  const SimOptions& options = provider.network().options();
  const SimLink& link = provider.network().link(provider.node(), peer_node, index_).spec;
  const std::string rate = link.bytes_per_second > 0
                               ? absl::StrFormat("%.3g Gb/s", link.bytes_per_second * 8 / 1e9)
                               : "unlimited";
  properties_ = {.provider = "sim",
                 .route = absl::StrFormat("sim node %u to node %u, link %u (%s, %.3g us)",
                                          provider.node(), peer_node, index_, rate,
                                          static_cast<double>(link.latency.count()) / 1e3),
                 .bytes_per_second = link.bytes_per_second > 0 ? link.bytes_per_second : 1e12,
                 .slice_bytes = options.slice_bytes,
                 .depth = options.rail_depth};
  provider_.rails_.push_back(this);
}

SimRail::~SimRail() { provider_.forget(*this); }

absl::Status SimRail::reaches(const RemoteRegion& remote) const {
  if (remote.owner == peer_uid_) return absl::OkStatus();
  return absl::InvalidArgumentError("the remote region belongs to another worker than this peer");
}

bool SimRail::post(const Slice& slice, EventSink& sink) {
  const TransferId id = slice.transfer->id;
  if (state_ == State::kReported) {
    provider_.network().violation(
        absl::StrCat("node ", provider_.node(), ": posting on a rail that is down"));
    sink.slice_done(*this, id, slice.index, absl::UnavailableError("this rail is down"));
    return true;
  }
  // Between the loss of the rail and rail_down() the worker cannot know better.
  if (state_ == State::kDown) return false;
  if (waiting_.size() + posted_.size() >= properties_.depth) return false;
  waiting_.push_back(slice);
  pump();
  return true;
}

void SimRail::pump() {
  if (provider_.network().frozen(provider_.node())) return;  // it is the program that posts
  while (state_ == State::kUp && queue_pair_.ready() && !waiting_.empty() &&
         queue_pair_.outstanding() < provider_.network().options().queue_depth) {
    const Slice slice = waiting_.front();
    waiting_.pop_front();
    const absl::Status status = queue_pair_.post(
        {.id = slice.index,
         .op = slice.transfer->op == Op::kWrite ? WorkRequest::Op::kWrite : WorkRequest::Op::kRead,
         .transfer = slice.transfer,
         .slice = slice.index,
         .begin = slice.begin,
         .end = slice.end});
    if (status.ok()) {
      posted_.push_back(slice);
    } else {
      provider_.report_done(*this, slice, status);
    }
  }
}

void SimRail::abort(TransferId transfer, EventSink&) {
  // What the queue pair holds cannot be called back; it ends by itself.
  waiting_.remove_if([&](const Slice& slice) {
    if (slice.transfer->id != transfer) return false;
    provider_.report_done(*this, slice, absl::CancelledError("cancelled"));
    return true;
  });
}

bool SimRail::let_go(TransferId transfer) const {
  // Those that wait had been posted, and come again behind a refused access.
  for (const base::Ring<Slice>* queue : {&posted_, &flushed_, &waiting_}) {
    for (size_t i = 0; i < queue->size(); ++i) {
      if ((*queue)[i].transfer->id == transfer) return false;
    }
  }
  return true;
}

void SimRail::close(absl::Status why, EventSink& sink) {
  if (state_ == State::kReported) return;
  closed_ = true;
  lose(why);
  provider_.deliver_all(*this, sink);
}

void SimRail::lose(const absl::Status& why) {
  if (state_ != State::kUp) return;
  const bool told = !queue_pair_.ready();
  queue_pair_.fail(why);
  if (told) broken(why, Break::kLost);  // it was broken already, and recovering
}

void SimRail::completed(uint64_t id, const absl::Status& status, bool flushed) {
  const Slice slice = posted_.front();
  posted_.pop_front();
  if (slice.index != id) {
    provider_.network().violation("the queue pair completed out of order");
  }
  if (flushed) {
    flushed_.push_back(slice);
    return;
  }
  provider_.report_done(*this, slice, status);
  pump();
}

void SimRail::landed(const Arrival& arrival) { provider_.report_arrival(*this, arrival); }

void SimRail::broken(const absl::Status& cause, Break how) {
  if (how != Break::kLost) {
    // The refused access was reported; the others are innocent and go again, in order.
    for (size_t i = flushed_.size(); i-- > 0;) waiting_.push_front(flushed_[i]);
    flushed_.clear();
    if (how == Break::kRefused) queue_pair_.recover();
    return;
  }
  state_ = State::kDown;
  // A rail that the worker closes reports the worker's reason; a lost one lets others take over.
  const absl::Status why = closed_ ? cause : absl::UnavailableError(cause.message());
  for (base::Ring<Slice>* queue : {&flushed_, &waiting_}) {
    for (size_t i = 0; i < queue->size(); ++i) {
      const Slice& slice = (*queue)[i];
      const bool may_have_landed = queue == &flushed_ && slice.transfer->op == Op::kWrite;
      provider_.report_done(*this, slice,
                            may_have_landed ? absl::UnknownError(cause.message()) : why);
    }
    queue->clear();
  }
  // What is closed as unavailable comes back, as what was lost does.
  provider_.rail_lost(*this, cause, closed_ && !absl::IsUnavailable(cause));
}

}  // namespace baton::sim
