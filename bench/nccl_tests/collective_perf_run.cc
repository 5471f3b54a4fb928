// One rank's timed calls of a collective, and the calls whose results are checked.
#include "bench/nccl_tests/collective_perf_rank.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <ctime>
#include <numeric>

#include "bench/nccl_tests/collective_check.h"
#include "bench/report/bench_memory.h"
#include "collectives/window.h"
#include "transport/base/limits/memory_left.h"
#include "transport/clock.h"
#include "transport/internal/device_memory.h"

namespace baton::bench {
namespace {

double cpu_us() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

double steady_us() {
  return std::chrono::duration<double, std::micro>(Clock::steady().now()).count();
}

// A buffer of the communicator, or (--malloc) plain memory; or (--memory cuda) a device's, of which
// the host has an image.
class Buffer {
 public:
  static absl::StatusOr<std::unique_ptr<Buffer>> make(Communicator& group, size_t bytes,
                                                      const CollectivePerfOptions& options) {
    std::unique_ptr<Buffer> buffer(new Buffer(group));
    if (options.cuda) {
      if (absl::Status there = device_is_there(options.cuda); !there.ok()) return there;
      auto device = internal::device_memory()->allocate(*options.cuda, bytes);
      if (!device.ok()) return device.status();
      buffer->device_ = *std::move(device);
    }
    if (options.plain_memory || options.cuda) {
      absl::Status fits = base::memory_fits("a buffer", bytes);
      if (!fits.ok()) return fits;
      buffer->plain_.resize(bytes + 64);
      const size_t past = reinterpret_cast<uintptr_t>(buffer->plain_.data()) % 64;
      buffer->data_ = buffer->plain_.data() + (64 - past);
      return buffer;
    }
    const auto shared = group.allocate(bytes);
    if (!shared.ok()) return shared.status();
    buffer->shared_ = *shared;
    buffer->data_ = shared->data;
    return buffer;
  }
  ~Buffer() {
    if (shared_.data != nullptr) group_.free(shared_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::byte* data() const { return data_; }
  // Where a call finds what the host has at `at`.
  std::byte* place(std::byte* at) const {
    return device_ == nullptr ? at : device_->data() + (at - data_);
  }
  // Copies `bytes` from `from`, of `source`, to `to`, of this buffer, for a rank's own part.
  absl::Status copy(std::byte* to, Buffer& source, std::byte* from, size_t bytes) {
    if (device_ == nullptr) {
      std::memmove(to, from, bytes);
      return absl::OkStatus();
    }
    std::vector<std::byte> part(bytes);
    absl::Status status =
        source.device_->get(static_cast<size_t>(from - source.data_), absl::MakeSpan(part));
    if (status.ok()) status = device_->put(static_cast<size_t>(to - data_), part);
    return status;
  }
  absl::Status load(size_t bytes) {
    return device_ == nullptr ? absl::OkStatus() : device_->put(0, {data_, bytes});
  }
  absl::Status fetch(size_t bytes) {
    return device_ == nullptr ? absl::OkStatus() : device_->get(0, {data_, bytes});
  }

 private:
  explicit Buffer(Communicator& group) : group_(group) {}
  Communicator& group_;
  std::vector<std::byte> plain_;
  std::unique_ptr<internal::DeviceBuffer> device_;
  CommBuffer shared_;
  std::byte* data_ = nullptr;
};

// What one rank measured of one half of a row, in a form that all ranks can exchange.
struct Samples {
  double mean_us = 0;
  double wrong = 0;
  std::vector<double> iterations_us;
};

class Measurement {
 public:
  Measurement(const CollectivePerfOptions& options, Communicator& group)
      : options_(options), group_(group), rank_(group.rank()), ranks_(group.ranks()) {}

  absl::Status allocate(const std::vector<CollectivePoint>& points) {
    for (const CollectivePoint& point : points) {
      const size_t element = size_of(point.type);
      const size_t skip = options_.unalign * element;
      in_stride_ = std::max(in_stride_, padded(point.in_elements * element + skip));
      out_stride_ = std::max(out_stride_, padded(point.out_elements * element + skip));
    }
    // In place, the larger of input and output lies in `out`.
    out_stride_ = std::max(in_stride_, out_stride_);
    const size_t copies = static_cast<size_t>(options_.aggregated);
    auto in = Buffer::make(group_, in_stride_ * copies, options_);
    if (!in.ok()) return in.status();
    auto out = Buffer::make(group_, out_stride_ * copies, options_);
    if (!out.ok()) return out.status();
    in_ = *std::move(in);
    out_ = *std::move(out);
    if (!options_.window) return absl::OkStatus();
    auto window = Window::create(group_, out_->data(), out_stride_ * copies);
    if (!window.ok()) return window.status();
    window_ = *std::move(window);
    return absl::OkStatus();
  }

  absl::StatusOr<PerfRow> row(const CollectivePoint& point) {
    point_ = point;
    if (point.op == ReduceOp::kPreMulSum) fill_factor(the_case(), rank_, factor_.data());
    PerfRow row{.point = point};
    for (const bool in_place : {false, true}) {
      if (in_place && !options_.can_be_in_place()) continue;
      in_place_ = in_place;
      auto half = this->half();
      if (!half.ok()) return half.status();
      row.halves[in_place ? 1 : 0] = *std::move(half);
    }
    return row;
  }

 private:
  static size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

  size_t element() const { return size_of(point_.type); }
  size_t copies() const { return static_cast<size_t>(options_.aggregated); }
  // Copy `slot` of the output; and of the input, which in place is a part of the output.
  std::byte* out(int slot) const {
    std::byte* const start =
        out_->data() + out_stride_ * static_cast<size_t>(slot) + options_.unalign * element();
    // In place a part lies where it belongs in the larger buffer.
    if (!in_place_ || !wide_input(options_.collective)) return start;
    return start + static_cast<size_t>(rank_) * point_.count * element();
  }
  std::byte* in(int slot) const {
    if (!in_place_) {
      return in_->data() + in_stride_ * static_cast<size_t>(slot) + options_.unalign * element();
    }
    std::byte* const start =
        out_->data() + out_stride_ * static_cast<size_t>(slot) + options_.unalign * element();
    if (!wide_output(options_.collective)) return start;
    return start + static_cast<size_t>(rank_) * point_.count * element();
  }

  CallOptions call() const {
    CallOptions call = options_.call;
    call.factor = factor_.data();
    return call;
  }

  // The call on copy `slot` of the buffers: begun, or, with `waits`, to its end, as a program makes
  // it that has one call at a time, and as the baselines do.
  absl::Status start(int slot, bool waits) {
    const void* from = (in_place_ ? out_ : in_)->place(in(slot));
    void* to = out_->place(out(slot));
    const CallOptions call = this->call();
    const size_t count = point_.count;
    const DataType type = point_.type;
    const ReduceOp op = point_.op;
    const int root = point_.root;
    using C = Communicator;
    const auto make = [&](auto begin, auto run, auto... arguments) {
      return waits ? (group_.*run)(arguments..., call) : keep((group_.*begin)(arguments..., call));
    };
    switch (options_.collective) {
      case Measured::kAllReduce:
        return make(&C::all_reduce_async, &C::all_reduce, from, to, count, type, op);
      case Measured::kReduceScatter:
        return make(&C::reduce_scatter_async, &C::reduce_scatter, from, to, count, type, op);
      case Measured::kAllGather:
        return make(&C::all_gather_async, &C::all_gather, from, to, count, type);
      case Measured::kBroadcast:
        return make(&C::broadcast_async, &C::broadcast, from, to, count, type, root);
      case Measured::kReduce:
        return make(&C::reduce_async, &C::reduce, from, to, count, type, op, root);
      case Measured::kAllToAll:
        return make(&C::all_to_all_async, &C::all_to_all, from, to, count, type);
      case Measured::kGather:
        return make(&C::gather_async, &C::gather, from, to, count, type, root);
      case Measured::kScatter:
        return make(&C::scatter_async, &C::scatter, from, to, count, type, root);
      case Measured::kSendReceive:
        return send_receive(slot, from, to);
      case Measured::kHypercube:
        return hypercube(slot);
      case Measured::kBarrier:
        break;
    }
    return make(&C::barrier_async, &C::barrier);
  }

  // To the next rank, and from the one before.
  absl::Status send_receive(int slot, const void* from, void* to) {
    const int after = (rank_ + 1) % ranks_, before = (rank_ + ranks_ - 1) % ranks_;
    const CallOptions call = this->call();
    const size_t count = point_.count;
    const DataType type = point_.type;
    if (window_ == nullptr) {
      absl::Status status = keep(group_.send_async(from, count, type, after, call));
      if (!status.ok()) return status;
      return keep(group_.receive_async(to, count, type, before, call));
    }
    const auto place = static_cast<size_t>(out(slot) - out_->data());
    // The flush tells when all puts that are in flight together have ended.
    CallOptions put = call;
    put.detached = options_.aggregated > 1;
    const auto work = window_->put_signal(from, count * size_of(type), after, place, 0, 1, put);
    absl::Status status = put.detached ? work.status() : keep(work);
    ++signals_;
    // The last signal comes behind the bytes of all.
    if (!status.ok() || slot + 1 < options_.aggregated) return status;
    if (put.detached) status = keep(window_->flush(after, call));
    status.Update(keep(window_->wait_signal(before, 0, signals_, call)));
    return status;
  }

  absl::Status send(const Buffer& buffer, std::byte* at, size_t count, int to) {
    return keep(group_.send_async(buffer.place(at), count, point_.type, to, options_.call));
  }
  absl::Status receive(std::byte* at, size_t count, int from) {
    return keep(group_.receive_async(out_->place(at), count, point_.type, from, options_.call));
  }
  absl::Status copy_own(std::byte* to, std::byte* from) {
    if (to == from) return absl::OkStatus();  // in place
    return out_->copy(to, in_place_ ? *out_ : *in_, from, point_.count * element());
  }

  // To its end: a step sends what the one before received.
  absl::Status hypercube(int slot) {
    const size_t count = point_.count, part = count * element();
    std::byte* const all = out(slot);
    absl::Status status = copy_own(all + static_cast<size_t>(rank_) * part, in(slot));
    for (int across = 1; status.ok() && across < ranks_; across *= 2) {
      const int mine = rank_ & ~(across - 1), theirs = mine ^ across, other = rank_ ^ across;
      const size_t elements = count * static_cast<size_t>(across);
      status = send(*out_, all + static_cast<size_t>(mine) * part, elements, other);
      if (status.ok()) {
        status = receive(all + static_cast<size_t>(theirs) * part, elements, other);
      }
      for (const Work& work : works_) status.Update(group_.wait(work));
      works_.clear();
    }
    return status;
  }

  absl::Status keep(absl::StatusOr<Work> work) {
    if (work.ok()) works_.push_back(*work);
    return work.status();
  }

  // One iteration: -m calls, waited for.
  absl::Status iterate() {
    const bool one_call = collective_of(options_.collective) != Collective::kSendReceive;
    if (options_.aggregated == 1 && one_call) return start(0, true);
    works_.clear();
    for (int slot = 0; slot < options_.aggregated; ++slot) {
      if (absl::Status status = start(slot, false); !status.ok()) return status;
    }
    absl::Status first;
    for (const Work& work : works_) first.Update(group_.wait(work));
    return first;
  }

  CollectiveCase the_case() const {
    return {.collective = options_.collective,
            .type = point_.type,
            .op = point_.op,
            .ranks = ranks_,
            .root = point_.root,
            .call = call_};
  }

  // New inputs in every copy, and outputs that hold none of them.
  absl::Status prepare() {
    ++call_;
    for (int slot = 0; slot < options_.aggregated; ++slot) {
      if (!in_place_) std::memset(out(slot), 0x5A, point_.out_elements * element());
      fill_input(the_case(), rank_, in(slot), point_.in_elements);
    }
    absl::Status status = in_->load(in_stride_ * copies());
    status.Update(out_->load(out_stride_ * copies()));
    // What the others put comes into outputs that were looked at and prepared.
    if (status.ok() && window_ != nullptr) status = group_.barrier();
    return status;
  }

  absl::StatusOr<double> wrong() {
    absl::Status status = in_->fetch(in_stride_ * copies());
    status.Update(out_->fetch(out_stride_ * copies()));
    if (!status.ok()) return status;
    uint64_t wrong = 0;
    for (int slot = 0; slot < options_.aggregated; ++slot) {
      wrong += count_wrong(the_case(), rank_, out(slot), point_.count);
      if (!in_place_) wrong += count_changed(the_case(), rank_, in(slot), point_.in_elements);
    }
    return static_cast<double>(wrong);
  }

  // Fills, warms up, times, checks.
  absl::StatusOr<PerfHalf> half() {
    Samples samples;
    samples.iterations_us.resize(static_cast<size_t>(options_.iterations));
    if (absl::Status status = prepare(); !status.ok()) return status;
    for (int i = 0; i < options_.warmup; ++i) {
      if (absl::Status status = iterate(); !status.ok()) return status;
    }
    if (absl::Status status = group_.barrier(); !status.ok()) return status;
    if (absl::Status status = timed(samples); !status.ok()) return status;
    // Out of place the timed calls themselves can be checked: all of them had the same input.
    for (int i = options_.checks > 0 && !in_place_ ? -1 : 0; i < options_.checks; ++i) {
      if (i >= 0) {
        if (absl::Status status = prepare(); !status.ok()) return status;
        if (absl::Status status = iterate(); !status.ok()) return status;
      }
      const absl::StatusOr<double> found = wrong();
      if (!found.ok()) return found.status();
      samples.wrong += *found;
    }
    return exchange(samples);
  }

  absl::Status timed(Samples& samples) {
    const bool barriers = options_.blocking == 1 || options_.blocking == 3;
    const bool counts_barriers = options_.blocking == 1;
    const auto now = [this] { return options_.cpu_time ? cpu_us() : steady_us(); };
    double total = 0;
    double from = now();
    for (double& sample : samples.iterations_us) {
      if (absl::Status status = iterate(); !status.ok()) return status;
      double to = now();
      if (barriers) {
        if (absl::Status status = group_.barrier(); !status.ok()) return status;
        const double after = now();
        sample = (counts_barriers ? after : to) - from;
        to = after;
      } else {
        sample = to - from;
      }
      total += sample;
      sample /= options_.aggregated;
      from = to;
    }
    samples.mean_us = total / (options_.iterations * options_.aggregated);
    return absl::OkStatus();
  }

  // Every rank learns what all measured, and makes the same of it.
  absl::StatusOr<PerfHalf> exchange(const Samples& samples) {
    std::vector<double> mine = {samples.mean_us, samples.wrong};
    mine.insert(mine.end(), samples.iterations_us.begin(), samples.iterations_us.end());
    const size_t width = mine.size();
    std::vector<double> all(width * static_cast<size_t>(ranks_));
    const absl::Status status = group_.all_gather(mine.data(), all.data(), width, DataType::kF64);
    if (!status.ok()) return status;
    const auto column = [&](size_t i) {
      std::vector<double> values;
      for (size_t at = i; at < all.size(); at += width) values.push_back(all[at]);
      return values;
    };
    PerfHalf half;
    half.us = average(column(0));
    half.bandwidth = bandwidth_of(options_.collective, point_.bytes, ranks_, half.us * 1e-6);
    if (options_.checks > 0) {
      const std::vector<double> wrong = column(1);
      half.wrong = std::accumulate(wrong.begin(), wrong.end(), 0.0);
    }
    for (size_t i = 2; i < width; ++i) {
      const std::vector<double> values = column(i);
      half.average_us.push_back(average(values));
      half.slowest_us.push_back(*std::max_element(values.begin(), values.end()));
    }
    return half;
  }

  double average(const std::vector<double>& values) const {
    switch (options_.average) {
      case Average::kRank0:
        return values.front();
      case Average::kMin:
        return *std::min_element(values.begin(), values.end());
      case Average::kMax:
        return *std::max_element(values.begin(), values.end());
      case Average::kMean:
        break;
    }
    return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
  }

  const CollectivePerfOptions& options_;
  Communicator& group_;
  const int rank_;
  const int ranks_;
  size_t in_stride_ = 0;
  size_t out_stride_ = 0;
  std::unique_ptr<Buffer> in_;
  std::unique_ptr<Buffer> out_;
  std::unique_ptr<Window> window_;  // on out_; null: none
  uint64_t signals_ = 0;            // that this rank has sent, and waited for
  CollectivePoint point_;
  std::array<std::byte, sizeof(double)> factor_{};  // of premulsum
  bool in_place_ = false;
  uint64_t call_ = 0;
  std::vector<Work> works_;
};

}  // namespace

absl::Status measure_collectives(const CollectivePerfOptions& options, Communicator& group,
                                 const std::function<void(const PerfRow&)>& on_row) {
  const std::vector<CollectivePoint> points = sweep(options, group.ranks());
  Measurement measurement(options, group);
  if (absl::Status status = measurement.allocate(points); !status.ok()) return status;
  for (int cycle = 0; options.cycles == 0 || cycle < options.cycles; ++cycle) {
    for (const CollectivePoint& point : points) {
      const auto row = measurement.row(point);
      if (!row.ok()) return row.status();
      on_row(*row);
    }
  }
  return absl::OkStatus();
}

}  // namespace baton::bench
