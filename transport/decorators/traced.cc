// A provider that writes a span for every slice.
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "transport/decorators.h"
#include "transport/decorators/decorated.h"

namespace baton {
namespace {

class TracedProvider;

class TracedRail final : public decorators::DecoratedRail {
 public:
  TracedRail(std::unique_ptr<Rail> inner, TracedProvider& provider)
      : decorators::DecoratedRail(std::move(inner)), provider_(provider) {}

  absl::StatusOr<RemoteView> view(const RemoteRegion& remote) const override {
    return inner_->view(remote);
  }
  bool shows_files() const override { return inner_->shows_files(); }
  bool post(const Slice& slice, EventSink& sink) override;
  void abort(TransferId transfer, EventSink& sink) override;
  void close(absl::Status why, EventSink& sink) override;
  void ended(TransferId transfer, uint32_t slice, const absl::Status& status);

 private:
  struct Open {
    Time begin{};
    uint64_t bytes = 0;
    Op op = Op::kWrite;
  };
  // A slot has one transfer at a time, so slot and slice name a slice that is under way.
  static uint64_t key(TransferId transfer, uint32_t slice) {
    return (uint64_t{transfer.slot} << 32) | slice;
  }

  TracedProvider& provider_;
  absl::flat_hash_map<uint64_t, Open> open_;
};

class TracedProvider final : public decorators::DecoratedProvider {
 public:
  TracedProvider(std::unique_ptr<Provider> inner, Timeline& timeline, const Clock& clock)
      : decorators::DecoratedProvider(std::move(inner)), timeline_(timeline), clock_(clock) {}

  Timeline& timeline() { return timeline_; }
  Time now() const { return clock_.now(); }

 protected:
  std::unique_ptr<Rail> decorate(std::unique_ptr<Rail> inner) override {
    return std::make_unique<TracedRail>(std::move(inner), *this);
  }
  void on_slice_done(decorators::DecoratedRail& rail, TransferId transfer, uint32_t slice,
                     absl::Status status, EventSink& sink) override {
    static_cast<TracedRail&>(rail).ended(transfer, slice, status);
    sink.slice_done(rail, transfer, slice, std::move(status));
  }

 private:
  Timeline& timeline_;
  const Clock& clock_;
};

bool TracedRail::post(const Slice& slice, EventSink& sink) {
  const uint64_t id = key(slice.transfer->id, slice.index);
  // Before post(), which may report the slice before it returns.
  open_[id] = {provider_.now(), slice.end - slice.begin, slice.transfer->op};
  decorators::DecoratedProvider::Sink inside(provider_, sink);
  if (inner_->post(slice, inside)) return true;
  open_.erase(id);
  return false;
}

void TracedRail::abort(TransferId transfer, EventSink& sink) {
  decorators::DecoratedProvider::Sink inside(provider_, sink);
  inner_->abort(transfer, inside);
}

void TracedRail::close(absl::Status why, EventSink& sink) {
  decorators::DecoratedProvider::Sink inside(provider_, sink);
  inner_->close(std::move(why), inside);
}

void TracedRail::ended(TransferId transfer, uint32_t slice, const absl::Status& status) {
  const auto it = open_.find(key(transfer, slice));
  if (it == open_.end()) return;
  const Open open = it->second;
  open_.erase(it);
  const bool write = open.op == Op::kWrite;
  std::string name = write ? "write" : "read";
  if (!status.ok()) absl::StrAppend(&name, absl::IsCancelled(status) ? " cancelled" : " failed");
  provider_.timeline().add({.track = write ? "tx" : "rx",
                            .name = std::move(name),
                            .begin = open.begin,
                            .end = provider_.now(),
                            // Below 2^53: exact in every JSON reader.
                            .request = (uint64_t{transfer.generation} << 16) | transfer.slot,
                            .bytes = open.bytes});
}

}  // namespace

std::unique_ptr<Provider> traced(std::unique_ptr<Provider> inner, Timeline& timeline,
                                 const Clock& clock) {
  return std::make_unique<TracedProvider>(std::move(inner), timeline, clock);
}

}  // namespace baton
