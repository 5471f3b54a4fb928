// Fuzzes a worker behind the handshake: two peers that have the key call, say whatever they like
// over their rails, lose them and call again, while the worker has transfers with them open. The
// input is a row of steps. Whatever comes, the worker stays alive, and once its peers are gone for
// good each of its transfers has ended, its own counter has not risen by itself, and it can go on.
//
// device_worker_fuzz.cc is the same over memory of a device.

#include "tests/fuzz/expect.h"
#include "tests/manual_clock.h"
#include "tests/std.h"
#include "tests/transport/scripted_provider.h"
#include "transport/base/log.h"
#include "transport/base/wire.h"
#include "transport/internal/messages/control_message.h"
#include "transport/internal/tables/arrivals.h"

#ifdef BATON_FUZZ_DEVICE
#include "gpudirect/contract/memory_place.h"
#include "tests/gpudirect/fake/fake_driver.h"
#endif

namespace baton {
namespace {

using internal::Arrivals;
using internal::ControlMessage;
using internal::StagingMessage;

constexpr int kMostSteps = 256;
constexpr size_t kMostRails = 8;
constexpr size_t kMostTransfers = 48;

// What the worker has registered.
#ifdef BATON_FUZZ_DEVICE
class FuzzedMemory {
 public:
  FuzzedMemory()
      : driver_(gpudirect::FakeDriver::driver()),
        devices_(std::make_unique<gpudirect::CudaMemory>(
            [this] { return &driver_; },
            gpudirect::CudaMemory::Options{
                .kernels = {}, .table = gpudirect::CopyTable{}, .root = "/nowhere"})),
        at_(fake_.allocate(size())) {
    internal::use_device_memory(devices_.get());
  }
  // No violation of the driver's rules, whatever peers have said.
  ~FuzzedMemory() {
    internal::use_device_memory(nullptr);
    devices_.reset();
    fake_.free(at_);
    expect(fake_.finish().empty());
  }
  void* data() const { return gpudirect::pointer_of<void>(at_); }
  static constexpr size_t size() { return 16 << 10; }
  void settle() { fake_.run_all(); }
  // As a peer describes its memory that lies, or does not know better.
  static void describe_wrongly(RemoteRegion& region, uint8_t how) {
    if (how & 1) region.kind = MemoryKind::kHost;
    if (how & 2) region.size *= 1 + how / 8;
    if (how & 4) region.key ^= how;
  }

 private:
  gpudirect::FakeDriver fake_{{.memory_bytes = 64 << 20}};
  gpudirect::Driver driver_;
  std::unique_ptr<gpudirect::CudaMemory> devices_;
  const gpudirect::DevicePointer at_;
};
#else
class FuzzedMemory {
 public:
  void* data() { return bytes_.data(); }
  static constexpr size_t size() { return 16 << 10; }
  void settle() {}
  static void describe_wrongly(RemoteRegion&, uint8_t) {}

 private:
  std::array<char, 16 << 10> bytes_{};
};
#endif

struct Caller {
  HelloInfo who;
  uint64_t session = 0;
};

class FuzzedWorker {
 public:
  explicit FuzzedWorker(std::string_view input) : in_(input) {
    WorkerOptions options;
    options.name = "fuzzed";
    options.key = *ClusterKey::from_bytes("the key of the fuzzed cluster");
    options.clock = &clock_;
    options.max_transfers = 64;
    options.settings = {{"staging.ring_mib", "16"}};
    options.extra_providers.emplace_back([this](const ProviderContext&) {
      auto made = std::make_unique<ScriptedProvider>();
      provider_ = made.get();
      return made;
    });
    worker_ = *Worker::create(std::move(options));
    worker_->progress();
    local_ = *worker_->register_memory(memory_.data(), memory_.size());
    counter_ = *worker_->allocate_counter();
    for (size_t i = 0; i < callers_.size(); ++i) introduce(callers_[i], i);
  }

  void run() {
    for (int i = 0; i < kMostSteps && !in_.failed(); ++i) {
      step(in_.number<uint8_t>());
      drop_closed();
    }
    leave();
  }

 private:
  static void introduce(Caller& caller, size_t number) {
    WorkerUid uid;
    uid.bytes.fill(static_cast<uint8_t>(number + 1));
    caller.who = {.uid = uid, .name = "caller", .session = 7 + number};
    caller.who.address = Address{.uid = uid,
                                 .name = "caller",
                                 .host_id = this_host_id(),
                                 .providers = {{"scripted", "there"}}}
                             .encode();
  }

  void step(uint8_t what) {
    switch (what % 16) {
      case 0:
        return call_in();
      case 1:
        return lose();
      case 2:
        return question();
      case 3:
        return answer_fence();
      case 4:
        return words(CounterTable::kControl);
      case 5:
        return words(CounterTable::kStaging);
      case 6:
        return staged();
      case 7:
        return arrival();
      case 8:
        return report();
      case 9:
        return submit();
      case 10:
        return cancel();
      case 11:
        return clock_.advance(std::chrono::milliseconds(in_.number<uint16_t>()));
      case 12:
        return take_up();
      case 13:
        return answer_call();
      case 14:
        return part();
      default:
        worker_->progress();
    }
  }

  Caller& caller() { return callers_[in_.number<uint8_t>() % callers_.size()]; }

  // A rail of this side's, live; null where there is none.
  ScriptedRail* rail() {
    const uint8_t which = in_.number<uint8_t>();
    return rails_.empty() ? nullptr : rails_[which % rails_.size()];
  }

  // A provider's links are its own: no two rails have the same.
  void call_in() {
    if (rails_.size() == kMostRails) return;
    HelloInfo who = caller().who;
    who.session += in_.number<uint8_t>() % 3;
    who.link = ++links_ << 20;
    who.resume = static_cast<Resume>(in_.number<uint8_t>() % 3);
    rails_.push_back(&provider_->call_in(who));
    worker_->progress();
  }

  // Rails that the worker has closed are its own again.
  void drop_closed() {
    std::erase_if(rails_, [this](const ScriptedRail* rail) { return provider_->is_closed(rail); });
  }

  void lose() {
    ScriptedRail* gone = rail();
    const bool goodbye = in_.number<uint8_t>() % 4 == 0;
    if (gone == nullptr) return;
    std::erase(rails_, gone);
    gone->report(absl::UnknownError("cut"));
    provider_->sink->rail_down(
        *gone, goodbye ? absl::AbortedError("it said goodbye") : absl::UnavailableError("cut"));
    worker_->progress();
  }

  void deliver(const Arrival& arrival) {
    ScriptedRail* over = rail();
    if (over == nullptr) return;
    provider_->sink->arrived(*over, arrival);
  }

  Arrival message(uint32_t counter, std::string_view text) {
    return {.transfer = {0, ++generation_},
            .counter_index = counter,
            .counter_generation = 1,
            .notify = text};
  }

  void words(uint32_t counter) {
    const std::string text(in_.take(in_.number<uint8_t>()));
    deliver(message(counter, text));
  }

  void question() {
    ControlMessage message{.kind = ControlMessage::Kind::kFence, .link = link()};
    const size_t count = in_.number<uint8_t>() % 4;
    for (size_t i = 0; i < count; ++i) {
      message.slices.push_back(
          {{in_.number<uint8_t>(), in_.number<uint8_t>()}, in_.number<uint8_t>()});
    }
    say(message);
  }
  void answer_fence() {
    ControlMessage message{.kind = ControlMessage::Kind::kFenced, .link = link()};
    const size_t count = in_.number<uint8_t>() % 8;
    for (size_t i = 0; i < count; ++i) {
      message.landed.push_back(static_cast<internal::Fate>(in_.number<uint8_t>() % 3));
    }
    say(message);
  }
  void part() { say({.kind = ControlMessage::Kind::kPart}); }
  void say(const ControlMessage& what) {
    const std::string text = what.encode();
    deliver(message(CounterTable::kControl, text));
  }
  uint64_t link() { return static_cast<uint64_t>(in_.number<uint8_t>() % 12) << 20; }

  void staged() {
    StagingMessage what;
    what.kind = static_cast<StagingMessage::Kind>(1 + in_.number<uint8_t>() % 6);
    what.chunk = {in_.number<uint8_t>(), in_.number<uint8_t>()};
    what.room = {in_.number<uint8_t>(), in_.number<uint8_t>()};
    what.region = *worker_->remote_region(local_);
    what.offset = in_.number<uint16_t>();
    what.bytes = 1 + in_.number<uint16_t>();
    what.runs = {{in_.number<uint16_t>(), what.bytes}};
    std::string text;
    what.encode(text);
    deliver(message(CounterTable::kStaging, text));
  }

  // Numbers as every provider lets them through.
  void arrival() {
    Arrival what;
    what.transfer = {in_.number<uint8_t>(), 1U + in_.number<uint8_t>()};
    what.slice = in_.number<uint16_t>() % Arrivals::kMaxSlices;
    what.slice_bytes = in_.number<uint16_t>();
    what.total_bytes = in_.number<uint16_t>();
    what.counter_index =
        in_.number<uint8_t>() % 4 == 0 ? CounterTable::kCredits : in_.number<uint8_t>();
    if (what.counter_index == counter_.index) ++what.counter_index;
    what.counter_generation = in_.number<uint8_t>() % 2;
    what.increment = in_.number<uint64_t>() & CounterTable::kMaxValue;
    const std::string text(in_.take(in_.number<uint8_t>()));
    what.notify = text;
    deliver(what);
  }

  // What the peer said of the oldest slice of a rail.
  void report() {
    ScriptedRail* over = rail();
    const auto code = static_cast<absl::StatusCode>(in_.number<uint8_t>() % 17);
    if (over == nullptr || over->held.empty()) return;
    const Slice slice = over->held.front();
    over->held.erase(over->held.begin());
    // Of a rail that is not being lost everything is known.
    const bool known = code != absl::StatusCode::kUnknown;
    provider_->sink->slice_done(*over, slice.transfer->id, slice.index,
                                known ? absl::Status(code, "so the peer says") : absl::OkStatus());
  }

  void submit() {
    const uint8_t shape = in_.number<uint8_t>();
    const size_t begin = in_.number<uint16_t>() % memory_.size();
    const size_t bytes = std::min<size_t>(in_.number<uint16_t>(), memory_.size() - begin);
    if (peers_.empty() || transfers_.size() == kMostTransfers) return;
    const PeerId peer = peers_[shape / 16 % peers_.size()];
    RemoteRegion there = *worker_->remote_region(local_);
    there.owner = owners_[shape / 16 % peers_.size()];
    FuzzedMemory::describe_wrongly(there, static_cast<uint8_t>(begin));
    TransferRequest request{.op = shape % 2 == 0 ? Op::kWrite : Op::kRead, .peer = peer};
    if (bytes > 0) {
      request.local = local_;
      request.local_layout = request.remote_layout = Layout::contiguous(begin, bytes);
      request.remote = there;
    }
    if (request.op == Op::kWrite && shape % 4 == 0) request.notify = "a message";
    if (shape % 8 > 4) request.timeout = std::chrono::milliseconds(shape);
    if (const auto id = worker_->submit(request); id.ok()) transfers_.push_back(*id);
  }

  void cancel() {
    const uint8_t which = in_.number<uint8_t>();
    if (transfers_.empty()) return;
    worker_->cancel(transfers_[which % transfers_.size()]).IgnoreError();
  }

  void take_up() {
    Notification note;
    while (worker_->next_notification(note)) {
    }
    while (const auto event = worker_->next_peer_event()) {
      if (event->kind != PeerEvent::Kind::kUp || peers_.size() == 8) continue;
      peers_.push_back(event->peer);
      owners_.push_back(event->uid);
    }
  }

  void answer_call() {
    const uint8_t how = in_.number<uint8_t>();
    if (provider_->calls.empty() || provider_->sink == nullptr) return;
    if (how % 4 == 0) return provider_->fail(absl::UnavailableError("nobody answers"));
    if (how % 4 == 1) return provider_->fail(absl::NotFoundError("nobody lives there"));
    HelloInfo who = caller().who;
    who.link = ++links_ << 20;
    if (rails_.size() == kMostRails) return;
    if (ScriptedRail* made = provider_->answer(who); made != nullptr) rails_.push_back(made);
  }

  // Nothing comes any more, and nobody lives at their addresses.
  void leave() {
    while (!rails_.empty()) {
      ScriptedRail* gone = rails_.back();
      rails_.pop_back();
      gone->lose("cut for good");
      worker_->progress();
      drop_closed();
    }
    for (int round = 0; round < 64; ++round) {
      clock_.advance(std::chrono::seconds(10));
      memory_.settle();
      worker_->progress();
      while (!provider_->calls.empty()) provider_->fail(absl::NotFoundError("nobody lives there"));
      worker_->progress();
    }
    for (const TransferId id : transfers_) {
      const auto state = worker_->state(id);
      expect(state.ok() && *state != TransferState::kActive && *state != TransferState::kEnding);
      expect(worker_->release(id).ok());
    }
    expect(worker_->stats().peers_up == 0);
    expect(worker_->counter_value(counter_) == 0);
    expect(worker_->deregister_memory(local_).ok());
  }

  base::WireReader in_;
  FuzzedMemory memory_;  // ends after the worker
  ManualClock clock_;
  ScriptedProvider* provider_ = nullptr;
  std::unique_ptr<Worker> worker_;
  MemoryRegion local_;
  CounterId counter_;
  std::array<Caller, 2> callers_;
  std::vector<ScriptedRail*> rails_;
  std::vector<PeerId> peers_;
  std::vector<WorkerUid> owners_;
  std::vector<TransferId> transfers_;
  uint64_t links_ = 0;
  uint32_t generation_ = 0;
};

}  // namespace
}  // namespace baton

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // Peers that are lost are what this is about.
  static const bool kQuiet = (baton::base::set_log_level(baton::base::LogLevel::kError), true);
  static_cast<void>(kQuiet);
  baton::FuzzedWorker({reinterpret_cast<const char*>(data), size}).run();
  return 0;
}
