// Gates between transfers and streams: events one way, words that a stream waits for the other.
#include "gpudirect/stream_gates.h"

#include <atomic>
#include <chrono>

#include "absl/strings/str_cat.h"

namespace baton::gpudirect {
namespace {

constexpr std::chrono::seconds kPassTime{1};  // for streams to pass, when the gates end

DevicePointer address_of(const uint64_t& word) {
  return static_cast<DevicePointer>(reinterpret_cast<uintptr_t>(&word));
}

}  // namespace

absl::StatusOr<std::unique_ptr<StreamGates>> StreamGates::open(const Device& device, size_t gates) {
  const Driver& driver = device.driver();
  if (!device.facts().has(kStreamMemOps64) || driver.cuStreamWaitValue64 == nullptr ||
      !device.facts().has(kCanUseHostPointerForRegisteredMemory)) {
    return absl::UnavailableError(absl::StrCat(
        "CUDA device ", device.ordinal(),
        " cannot let a stream wait for a word of the host (stream_memops_64 and "
        "host_pointer_on_device of `baton info`, and a driver for CUDA 11.7 or newer): wait for "
        "transfers on the host, or update the driver"));
  }
  if (gates == 0 || gates > kMostGates) {
    return absl::InvalidArgumentError(
        absl::StrCat(gates, " gates between streams and transfers: 1 to ", kMostGates));
  }
  std::unique_ptr<StreamGates> out(new StreamGates(device));
  if (absl::Status status = out->start(gates); !status.ok()) return status;
  return out;
}

absl::Status StreamGates::start(size_t gates) {
  const Device::Current current(device_);
  if (!current.status().ok()) return current.status();
  auto pages = RegisteredPages::make(device_, gates * sizeof(Words));
  if (!pages.ok()) return pages.status();
  pages_ = *std::move(pages);
  words_ = pages_->as<Words>();
  gates_.resize(gates);
  return absl::OkStatus();
}

StreamGates::~StreamGates() {
  for (Gate& gate : gates_) {
    if (gate.taken) end(gate, GateState::kAborted);
  }
  bool all_passed = !unmarked_;
  device_.give_back([&] {  // nothing runs on a lost device
    const auto begin = std::chrono::steady_clock::now();
    for (Gate& gate : gates_) {
      while (gate.holds && !passed(gate)) {
        if (std::chrono::steady_clock::now() - begin < kPassTime) continue;
        all_passed = false;
        break;
      }
      if (gate.own != nullptr) device_.driver().cuEventDestroy(gate.own);
    }
  });
  // NOLINTNEXTLINE(bugprone-unused-return-value): a stream may still read it
  if (!all_passed) static_cast<void>(pages_.release());
}

// Whether nothing on a stream waits for this gate any more.
bool StreamGates::passed(Gate& gate) const {
  const Result result = device_.driver().cuEventQuery(gate.own);
  // A failed query tells nothing about the stream, except when the device is lost.
  if (result != kSuccess && !is_loss(result)) return false;
  gate.holds = gate.passing = false;
  return true;
}

absl::StatusOr<uint32_t> StreamGates::take(Time deadline, bool marks) {
  if (deadline == kNever) {
    return absl::InvalidArgumentError(
        "a wait between a stream and a transfer needs a deadline, since nothing else would end it");
  }
  for (uint32_t slot = 0; slot < gates_.size(); ++slot) {
    Gate& gate = gates_[slot];
    if (gate.taken || (gate.passing && !passed(gate))) continue;
    if (marks && gate.own == nullptr) {  // a fast call: most programs need few of them
      Event event = nullptr;
      absl::Status status = device_.check(
          device_.driver().cuEventCreate(&event, kEventDisableTiming), "making an event");
      if (!status.ok()) return status;
      gate.own = event;
    }
    gate.taken = true;
    gate.holds = false;
    gate.state = GateState::kWaiting;
    gate.deadline = deadline;
    gate.awaited = nullptr;
    gate.failure = absl::OkStatus();
    ++gate.epoch;
    if (++gate.generation == 0) gate.generation = 1;
    return slot;
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("all ", gates_.size(),
                   " gates between streams and transfers are taken: close() those that have ended, "
                   "or open more"));
}

absl::Status StreamGates::check(Stream stream) const {
  if (device_.driver().cuStreamIsCapturing == nullptr) return absl::OkStatus();
  int recorded = kCaptureNone;
  const Result result = device_.driver().cuStreamIsCapturing(stream, &recorded);
  if (result == kSuccess && recorded == kCaptureNone) return absl::OkStatus();
  if (result != kSuccess && result != kCaptureImplicit) {
    return device_.check_named(result, "asking whether a stream is being recorded");
  }
  return absl::FailedPreconditionError(
      "the stream is being recorded into a CUDA graph, which may be launched many times, while a "
      "transfer runs once: name the stream before or after the recording");
}

absl::Status StreamGates::mark(const Gate& gate, Stream stream) const {
  const Result result = device_.driver().cuEventRecord(gate.own, stream);
  return device_.check_named(
      result, result == kInvalidHandle ? absl::StrCat("recording an event on a stream, which must "
                                                      "be of the primary context of CUDA device ",
                                                      device_.ordinal())
                                       : "marking where a stream is");
}

absl::StatusOr<GateId> StreamGates::after(Stream stream, Time deadline) {
  const Device::Current current(device_);
  if (!current.status().ok()) return current.status();
  if (absl::Status status = check(stream); !status.ok()) return status;
  const auto slot = take(deadline, true);
  if (!slot.ok()) return slot.status();
  Gate& gate = gates_[*slot];
  gate.awaited = gate.own;
  absl::Status status = mark(gate, stream);
  gate.taken = status.ok();
  if (!status.ok()) return status;
  return id_of(*slot);
}

absl::StatusOr<GateId> StreamGates::after(Event event, Time deadline) {
  const Device::Current current(device_);
  if (!current.status().ok()) return current.status();
  const auto slot = take(deadline, false);
  if (!slot.ok()) return slot.status();
  gates_[*slot].awaited = event;
  return id_of(*slot);
}

absl::StatusOr<Hold> StreamGates::hold(Stream stream, Time deadline) {
  for (const Direction direction :
       {Direction::kToHost, Direction::kToDevice, Direction::kBetween}) {
    if (stream != device_.stream(direction)) continue;
    return absl::InvalidArgumentError(
        "a copy stream cannot wait for a transfer, which may need that stream: hold the stream "
        "that uses the data");
  }
  const Device::Current current(device_);
  if (!current.status().ok()) return current.status();
  if (absl::Status status = check(stream); !status.ok()) return status;
  const auto slot = take(deadline, true);
  if (!slot.ok()) return slot.status();
  Gate& gate = gates_[*slot];
  Words& words = words_[*slot];
  // Before it waits: could a stream not be marked, nothing would know when it has passed.
  absl::Status status = mark(gate, stream);
  if (status.ok()) {
    status = device_.check(device_.driver().cuStreamWaitValue64(stream, address_of(words.flag),
                                                                gate.epoch, kWaitUntilNotBehind),
                           "letting a stream wait for a transfer");
  }
  if (!status.ok()) {
    gate.taken = false;
    return status;
  }
  gate.holds = true;
  // So that CUDA too knows that the stream is behind the wait.
  if (status = mark(gate, stream); !status.ok()) {
    end(gate, GateState::kAborted);  // the stream waits already
    gate.taken = false;
    // When it has passed can be known after all, or never.
    if (mark(gate, stream).ok()) {
      gate.passing = true;
    } else {
      gate.holds = false;
      unmarked_ = true;
    }
    return status;
  }
  return Hold{id_of(*slot), address_of(words.outcome), 2 * gate.epoch};
}

absl::StatusOr<StreamGates::Gate*> StreamGates::find(GateId id) {
  if (id.slot >= gates_.size() || !gates_[id.slot].taken ||
      gates_[id.slot].generation != id.generation) {
    return absl::NotFoundError("no such gate: it was closed");
  }
  return &gates_[id.slot];
}

void StreamGates::end(Gate& gate, GateState state) {
  if (gate.state != GateState::kWaiting) return;
  gate.state = state;
  if (!gate.holds) return;
  Words& words = words_[static_cast<size_t>(&gate - gates_.data())];
  const uint64_t outcome = 2 * gate.epoch + (state == GateState::kOpen ? 0 : 1);
  std::atomic_ref(words.outcome).store(outcome, std::memory_order_relaxed);
  // The flag last: a stream that is let through sees the outcome.
  std::atomic_ref(words.flag).store(gate.epoch, std::memory_order_release);
}

absl::StatusOr<GateState> StreamGates::poll(GateId id, Time now) {
  const auto gate = find(id);
  if (!gate.ok()) return gate.status();
  if ((*gate)->state != GateState::kWaiting) return (*gate)->state;
  if (!(*gate)->holds) {
    const Device::Current current(device_);
    absl::Status status = current.status();
    Result result = kNotReady;
    if (status.ok()) result = device_.driver().cuEventQuery((*gate)->awaited);
    if (result != kNotReady) status = device_.check_named(result, "asking where a stream is");
    if (!status.ok()) end(**gate, GateState::kAborted);
    if (result == kSuccess) end(**gate, GateState::kOpen);
    (*gate)->failure = std::move(status);
  }
  if (now >= (*gate)->deadline) end(**gate, GateState::kDeadline);
  return (*gate)->state;
}

absl::Status StreamGates::failure(GateId id) const {
  return id.slot < gates_.size() && gates_[id.slot].generation == id.generation
             ? gates_[id.slot].failure
             : absl::OkStatus();
}

absl::Status StreamGates::release(GateId id) {
  const auto gate = find(id);
  if (!gate.ok()) return gate.status();
  if (!(*gate)->holds) {
    return absl::FailedPreconditionError("no stream waits at this gate: it was made by after()");
  }
  if ((*gate)->state != GateState::kWaiting) {
    return absl::FailedPreconditionError(
        "the stream continued without the data: its deadline passed, or it was aborted");
  }
  end(**gate, GateState::kOpen);
  return absl::OkStatus();
}

absl::Status StreamGates::abort(GateId id) {
  const auto gate = find(id);
  if (!gate.ok()) return gate.status();
  end(**gate, GateState::kAborted);
  return absl::OkStatus();
}

absl::Status StreamGates::close(GateId id) {
  const auto gate = find(id);
  if (!gate.ok()) return gate.status();
  end(**gate, GateState::kAborted);
  (*gate)->taken = false;
  (*gate)->passing = (*gate)->holds;
  return absl::OkStatus();
}

}  // namespace baton::gpudirect
