// One end of a perftest-shaped test: its memory, the other end's, and the check of the bytes.
#include "bench/perftest/perf_end.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "bench/report/bench_memory.h"
#include "bench/report/dialogue.h"

namespace baton::bench {
namespace {

constexpr size_t kBeyond = 4096;  // bytes behind the last message that are checked for strays
constexpr size_t kCacheLine = 64;

// Written by the other side while we look: never cached, never torn.
std::byte peek(const std::byte* at) {
  return std::atomic_ref(*const_cast<std::byte*>(at)).load(std::memory_order_acquire);
}

}  // namespace

absl::StatusOr<std::unique_ptr<PerfEnd>> PerfEnd::create(Worker& worker, PeerId peer,
                                                         const PerfPlan& plan,
                                                         const PerfMemory& memory) {
  std::unique_ptr<PerfEnd> end(new PerfEnd(worker, peer, plan));
  const size_t bytes = 2 * plan.area;
  auto made = BenchMemory::make(worker, bytes, memory.device);
  if (!made.ok()) return made.status();
  end->memory_ = *std::move(made);
  end->unseen_ = end->memory_->on_device();
  end->tx_ = end->memory_->host();
  end->rx_ = end->tx_ + plan.area;
  if (memory.huge_pages && end->backing().find("MiB") == std::string::npos) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "--use_hugepages: the memory is %s; reserve some: `sysctl vm.nr_hugepages=%u`",
        end->backing(), bytes / (size_t{2} << 20) + 1));
  }
  for (CounterId* each : {&end->counter_, &end->credits_}) {
    const auto counter = worker.allocate_counter();
    if (!counter.ok()) return counter.status();
    *each = *counter;
  }
  return end;
}

PerfEnd::~PerfEnd() {
  for (const CounterId each : {counter_, credits_}) {
    if (each.generation != 0) worker_.free_counter(each).IgnoreError();
  }
}

absl::StatusOr<Json> PerfEnd::describe() const {
  const auto region = worker_.remote_region(memory_->region());
  if (!region.ok()) return region.status();
  const auto hex = [](const std::string& bytes) {
    return std::string(absl::BytesToHexString(bytes));
  };
  return Json{{"region", hex(region->encode())},
              {"offset", memory_->offset()},
              {"unseen", memory_->on_device()},
              {"counter", hex(worker_.remote_counter(counter_).encode())},
              {"credits", hex(worker_.remote_counter(credits_).encode())}};
}

absl::Status PerfEnd::attach(const Json& message) {
  const auto ends = message.find("ends");
  const Json none;
  const Json& told = ends == message.end() ? none : *ends;
  const auto bytes = [&](const char* key) {
    return std::string(absl::HexStringToBytes(text_of(told, key)));
  };
  const auto region = RemoteRegion::decode(bytes("region"));
  if (!region.ok()) return region.status();
  const auto counter = RemoteCounter::decode(bytes("counter"));
  if (!counter.ok()) return counter.status();
  const auto credits = RemoteCounter::decode(bytes("credits"));
  if (!credits.ok()) return credits.status();
  const auto offset = told.find("offset");
  if (offset == told.end() || !offset->is_number_unsigned() ||
      offset->get<uint64_t>() > region->size ||
      region->size - offset->get<uint64_t>() < 2 * plan_.area) {
    return absl::InvalidArgumentError("the other side's memory is smaller than agreed");
  }
  const auto unseen = told.find("unseen");
  if (unseen == told.end() || !unseen->is_boolean()) {
    return absl::InvalidArgumentError(
        "the other side does not describe its memory: run the same release on both sides");
  }
  unseen_ = unseen_ || unseen->get<bool>();
  remote_ = *region;
  remote_offset_ = offset->get<uint64_t>();
  remote_counter_ = *counter;
  remote_credits_ = *credits;
  return absl::OkStatus();
}

// The checked part of the first `messages` messages of an area.
Layout PerfEnd::payload(size_t messages) const {
  const size_t bytes = run_.size - (marks() ? 1 : 0);
  return bytes == 0 ? Layout() : Layout::strided(0, messages, PerfPlan::stride(run_.size), bytes);
}

absl::Status PerfEnd::prepare(const PerfRun& run) {
  run_ = run;
  slots_ = std::max<size_t>(1, plan_.slots(run.size));
  const size_t places = static_cast<size_t>(
      run.iterations == 0 ? slots_ : std::min<uint64_t>(slots_, run.iterations));
  used_ = std::min(plan_.area, places * PerfPlan::stride(run.size) + kBeyond);
  if (plan_.verify || marks()) {
    poison(rx_, used_);
    poison(tx_, used_);
    if (payload(1).bytes() > 0) fill(tx_, payload(places), run.seed);
  }
  for (size_t at = 0; plan_.cold && at < memory_->size(); at += kCacheLine) peek(tx_ + at);
  counted_ = worker_.counter_value(counter_);
  return memory_->load();
}

TransferRequest PerfEnd::request(uint64_t number) const {
  TransferRequest out;
  out.peer = peer_;
  const size_t at = slot(number) * PerfPlan::stride(run_.size);
  const size_t tx = at, rx = plan_.area + at;
  out.op = writes() ? Op::kWrite : Op::kRead;
  out.local = memory_->region();
  out.local_layout = Layout::contiguous(memory_->offset() + (writes() ? tx : rx), run_.size);
  out.remote = remote_;
  out.remote_layout = Layout::contiguous(remote_offset_ + (writes() ? rx : tx), run_.size);
  if (counts()) out.counter = remote_counter_;
  return out;
}

void PerfEnd::mark(uint64_t number) {
  tx_[slot(number) * PerfPlan::stride(run_.size) + run_.size - 1] = std::byte{mark_of(number)};
}

bool PerfEnd::marked(uint64_t number) const {
  if (counts()) return messages_arrived() > number;
  const std::byte* last = rx_ + slot(number) * PerfPlan::stride(run_.size) + run_.size - 1;
  return peek(last) == std::byte{mark_of(number)};
}

bool PerfEnd::may_send() const {
  return !sends() || sent_ < worker_.counter_value(credits_) + plan_.receives;
}

bool PerfEnd::take_in() {
  if (!sends() || plan_.test.latency) return false;
  const uint64_t taken = worker_.counter_value(counter_);
  if (taken - told_ < std::max<size_t>(1, plan_.receives / 4)) return false;
  TransferRequest credit;
  credit.peer = peer_;
  credit.counter = remote_credits_;
  credit.increment = taken - told_;
  credit.detached = true;
  if (!worker_.submit(credit).ok()) return false;  // no slot is free: next time
  told_ = taken;
  return true;
}

absl::Status PerfEnd::verify(uint64_t messages) {
  if (absl::Status status = memory_->fetch(); !status.ok()) return status;
  const size_t touched = static_cast<size_t>(std::min<uint64_t>(messages, slots_));
  const size_t stride = PerfPlan::stride(run_.size);
  for (size_t i = 0; marks() && i < touched; ++i) {
    // The last message that used this place.
    const uint64_t last = i + (messages - 1 - i) / slots_ * slots_;
    std::byte* mark = rx_ + i * stride + run_.size - 1;
    if (peek(mark) != std::byte{mark_of(last)}) {
      return absl::DataLossError(absl::StrFormat("the last byte of message %u is wrong", last));
    }
    poison(mark, 1);
  }
  if (!plan_.verify) return absl::OkStatus();
  return check(rx_, used_, touched == 0 || payload(1).bytes() == 0 ? Layout() : payload(touched),
               run_.seed);
}

}  // namespace baton::bench
