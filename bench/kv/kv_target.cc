// The passive side of `baton kv_bw`: provides the memory that an initiator asks for.
#include "bench/kv/kv_target.h"

#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "bench/kv/workload.h"
#include "bench/report/bench_memory.h"
#include "bench/report/dialogue.h"
#include "bench/report/pattern.h"

namespace baton::bench {
namespace {

// One initiator and the memory it works on.
class Client {
 public:
  Client(Worker& worker, PeerId peer, std::optional<int> device)
      : worker_(worker), peer_(peer), device_(device) {}

  PeerId peer() const { return peer_; }

  Json answer(const Json& request) {
    const std::string what = text_of(request, "do");
    if (what == "setup") return setup(request);
    if (memory_ == nullptr) return refusal(absl::FailedPreconditionError("send \"setup\" first"));
    const Layout& layout = source_ ? workload_->source() : workload_->target();
    const auto seed = request.find("seed");
    const uint64_t number =
        seed != request.end() && seed->is_number_unsigned() ? seed->get<uint64_t>() : 0;
    absl::Status status;
    if (what == "poison") {
      poison(memory_->host(), memory_->size());
      status = memory_->load();
    } else if (what == "fill") {
      fill(memory_->host(), layout, number);
      status = memory_->load();
    } else if (what == "check") {
      status = memory_->fetch();
      if (status.ok()) status = check(memory_->host(), memory_->size(), layout, number);
    } else {
      return refusal(absl::InvalidArgumentError(absl::StrCat("unknown request \"", what, "\"")));
    }
    return status.ok() ? Json{{"ok", true}} : refusal(status);
  }

 private:
  Json setup(const Json& request) {
    const auto spec = WorkloadSpec::from_json(request.value("workload", Json()));
    if (!spec.ok()) return refusal(spec.status());
    auto workload = Workload::make(*spec);
    if (!workload.ok()) return refusal(workload.status());
    memory_.reset();
    workload_ = *std::move(workload);
    source_ = text_of(request, "role") == "source";
    const size_t bytes = source_ ? workload_->source_bytes() : workload_->target_bytes();
    auto memory = BenchMemory::make(worker_, bytes, device_);
    if (!memory.ok()) return refusal(memory.status());
    const auto region = worker_.remote_region((*memory)->region());
    if (!region.ok()) return refusal(region.status());
    memory_ = *std::move(memory);
    return {{"ok", true},
            {"region", std::string(absl::BytesToHexString(region->encode()))},
            {"offset", memory_->offset()},
            {"backing", memory_->backing()}};
  }

  Worker& worker_;
  const PeerId peer_;
  std::unique_ptr<Workload> workload_;
  const std::optional<int> device_;
  std::unique_ptr<BenchMemory> memory_;
  bool source_ = false;
};

}  // namespace

absl::Status serve_kv_target(Worker& worker, const KvTargetOptions& options) {
  std::unique_ptr<Client> client;
  const auto leave = [&] {
    client.reset();
    if (options.say) options.say("the initiator has left");
  };
  while (true) {
    Notification message;
    std::optional<PeerEvent> event;
    bool told = false;
    const absl::Status status = worker.wait_until([&] {
      told = worker.next_notification(message);
      if (!told) event = worker.next_peer_event();
      return told || event.has_value();
    });
    if (!status.ok()) return status;
    if (event.has_value()) {
      if (event->kind == PeerEvent::Kind::kUp) {
        if (options.say) options.say(absl::StrCat("connected: ", worker.explain(event->peer)));
      } else if (event->kind == PeerEvent::Kind::kDown && client != nullptr &&
                 event->peer == client->peer()) {
        leave();
        if (options.once) return absl::OkStatus();
      }
      continue;
    }
    const Json request = parse_message(message.payload);
    const bool known = client != nullptr && message.peer == client->peer();
    Json reply;
    if (request.is_null()) {
      reply = refusal(absl::InvalidArgumentError("a request must be a JSON object"));
    } else if (text_of(request, "do") == "bye") {
      if (!known) continue;
      leave();
      if (options.once) return absl::OkStatus();
      continue;
    } else if (client != nullptr && !known) {
      reply = refusal(absl::UnavailableError("another initiator is being served: try again later"));
    } else {
      if (!known) client = std::make_unique<Client>(worker, message.peer, options.device);
      reply = client->answer(request);
    }
    worker.notify_detached(message.peer, reply.dump()).IgnoreError();
  }
}

}  // namespace baton::bench
