// Gates between transfers and streams: events one way, words that a stream waits for the other.
#include "gpudirect/contract/stream_gates.h"

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
  slots_.resize(gates);
  return absl::OkStatus();
}

StreamGates::~StreamGates() {
  for (Slot& slot : slots_) {
    if (slot.taken) end(slot, false);
  }
  bool all_passed = !unmarked_;
  device_.give_back([&] {  // nothing runs on a lost device
    const auto begin = std::chrono::steady_clock::now();
    for (Slot& slot : slots_) {
      while (slot.holds && !passed(slot)) {
        if (std::chrono::steady_clock::now() - begin < kPassTime) continue;
        all_passed = false;
        break;
      }
      if (slot.own != nullptr) device_.driver().cuEventDestroy(slot.own);
    }
  });
  // NOLINTNEXTLINE(bugprone-unused-return-value): a stream may still read it
  if (!all_passed) static_cast<void>(pages_.release());
}

// Whether nothing on a stream waits for this gate any more.
bool StreamGates::passed(Slot& slot) const {
  const Result result = device_.driver().cuEventQuery(slot.own);
  // A failed query tells nothing about the stream, except when the device is lost.
  if (result != kSuccess && !is_loss(result)) return false;
  slot.holds = slot.passing = false;
  return true;
}

absl::StatusOr<uint32_t> StreamGates::take(Time deadline, bool marks) {
  if (deadline == kNever) {
    return absl::InvalidArgumentError(
        "a wait between a stream and a transfer needs a deadline, since nothing else would end it");
  }
  for (uint32_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.taken || (slot.passing && !passed(slot))) continue;
    if (marks && slot.own == nullptr) {  // a fast call: most programs need few of them
      Event event = nullptr;
      absl::Status status = device_.check(
          device_.driver().cuEventCreate(&event, kEventDisableTiming), "making an event");
      if (!status.ok()) return status;
      slot.own = event;
    }
    slot.taken = true;
    slot.holds = false;
    slot.result.reset();
    slot.awaited = nullptr;
    ++slot.epoch;
    ++slot.generation;
    return i;
  }
  return absl::ResourceExhaustedError(
      "all waits between this worker's transfers and the streams of the device are in use: submit "
      "again after some transfers have begun or ended, and release() those that a stream waited "
      "for");
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

absl::Status StreamGates::mark(const Slot& slot, Stream stream) const {
  const Result result = device_.driver().cuEventRecord(slot.own, stream);
  return device_.check_named(
      result, result == kInvalidHandle ? absl::StrCat("recording an event on a stream, which must "
                                                      "be of the primary context of CUDA device ",
                                                      device_.ordinal())
                                       : "marking where a stream is");
}

absl::StatusOr<StreamGates::Gate> StreamGates::after_stream(void* stream, Time deadline) {
  const Device::Current current(device_);
  if (!current.status().ok()) return current.status();
  const auto theirs = static_cast<Stream>(stream);
  if (absl::Status status = check(theirs); !status.ok()) return status;
  const auto number = take(deadline, true);
  if (!number.ok()) return number.status();
  Slot& slot = slots_[*number];
  slot.awaited = slot.own;
  absl::Status status = mark(slot, theirs);
  slot.taken = status.ok();
  if (!status.ok()) return status;
  return number_of(*number);
}

absl::StatusOr<StreamGates::Gate> StreamGates::after_event(void* event, Time deadline) {
  if (event == nullptr) {
    return absl::InvalidArgumentError("TransferRequest::after_event names no event");
  }
  const Device::Current current(device_);
  if (!current.status().ok()) return current.status();
  const auto number = take(deadline, false);
  if (!number.ok()) return number.status();
  slots_[*number].awaited = static_cast<Event>(event);
  return number_of(*number);
}

absl::StatusOr<StreamGates::Hold> StreamGates::hold(void* stream, Time deadline) {
  const auto theirs = static_cast<Stream>(stream);
  for (const Direction direction :
       {Direction::kToHost, Direction::kToDevice, Direction::kBetween}) {
    if (theirs != device_.stream(direction)) continue;
    return absl::InvalidArgumentError(
        "a copy stream cannot wait for a transfer, which may need that stream: hold the stream "
        "that uses the data");
  }
  const Device::Current current(device_);
  if (!current.status().ok()) return current.status();
  if (absl::Status status = check(theirs); !status.ok()) return status;
  const auto number = take(deadline, true);
  if (!number.ok()) return number.status();
  Slot& slot = slots_[*number];
  Words& words = words_[*number];
  // Before it waits: could a stream not be marked, nothing would know when it has passed.
  absl::Status status = mark(slot, theirs);
  if (status.ok()) {
    status = device_.check(device_.driver().cuStreamWaitValue64(theirs, address_of(words.flag),
                                                                slot.epoch, kWaitUntilNotBehind),
                           "letting a stream wait for a transfer");
  }
  if (!status.ok()) {
    slot.taken = false;
    return status;
  }
  slot.holds = true;
  // So that CUDA too knows that the stream is behind the wait.
  if (status = mark(slot, theirs); !status.ok()) {
    end(slot, false);  // the stream waits already
    slot.taken = false;
    // When it has passed can be known after all, or never.
    if (mark(slot, theirs).ok()) {
      slot.passing = true;
    } else {
      slot.holds = false;
      unmarked_ = true;
    }
    return status;
  }
  return Hold{number_of(*number), {address_of(words.outcome), 2 * slot.epoch}};
}

StreamGates::Slot* StreamGates::find(Gate gate) {
  const auto number = static_cast<uint32_t>(gate);
  if (number >= slots_.size() || !slots_[number].taken || number_of(number) != gate) return nullptr;
  return &slots_[number];
}

std::optional<absl::Status> StreamGates::passed(Gate gate, Time /*now*/) {
  Slot* const slot = find(gate);
  if (slot == nullptr) return absl::NotFoundError("no such gate: it was closed");
  if (!slot->result.has_value() && !slot->holds) {
    const Device::Current current(device_);
    absl::Status status = current.status();
    Result result = kSuccess;
    if (status.ok()) result = device_.driver().cuEventQuery(slot->awaited);
    if (result == kNotReady) return std::nullopt;
    if (status.ok()) status = device_.check_named(result, "asking where a stream is");
    slot->result = std::move(status);
  }
  return slot->result;
}

void StreamGates::end(Slot& slot, bool delivered) {
  if (slot.result.has_value()) return;
  slot.result = delivered ? absl::OkStatus() : absl::AbortedError("nothing was delivered");
  if (!slot.holds) return;
  Words& words = words_[static_cast<size_t>(&slot - slots_.data())];
  const uint64_t outcome = 2 * slot.epoch + (delivered ? 0 : 1);
  std::atomic_ref(words.outcome).store(outcome, std::memory_order_relaxed);
  // The flag last: a stream that is let through sees the outcome.
  std::atomic_ref(words.flag).store(slot.epoch, std::memory_order_release);
}

void StreamGates::end(Gate gate, bool delivered) {
  if (Slot* const slot = find(gate); slot != nullptr) end(*slot, delivered);
}

void StreamGates::close(Gate gate) {
  Slot* const slot = find(gate);
  if (slot == nullptr) return;
  end(*slot, false);
  slot->taken = false;
  slot->passing = slot->holds;
}

}  // namespace baton::gpudirect
