// Calls of groups in virtual time: what each rank gives, what it must get, and that nothing is
// written to its memory once its call has ended.
#pragma once

#include "collectives/communicator.h"
#include "tests/test.h"

namespace baton {

class SimCall {
 public:
  static constexpr size_t kKinds = 9;

  // Begins the call of that kind at this rank; all ranks begin the same. Half of them on memory of
  // the endpoint.
  SimCall(Communicator& comm, size_t kind, size_t count, int root) : endpoint_(comm.endpoint()) {
    const auto n = static_cast<size_t>(comm.ranks());
    const auto me = static_cast<size_t>(comm.rank());
    const size_t from = static_cast<size_t>(root) % n;
    const size_t ins = kind == 2 || kind == 4 || kind == 7 ? n * count : count;
    const size_t outs = kind == 3 || kind == 4 || kind == 6 ? n * count : count;
    allocate(ins + outs, (kind + count) % 2 == 0);
    float* const in = data_;
    float* const out = data_ + ins;
    // Block b of what rank r gives is r * 10 + b; where there is one block, r.
    for (size_t b = 0; b < ins / count; ++b) fill(in + b * count, count, value(me, b));
    expected_.resize(outs);
    fill(expected_.data(), outs, kPoison);
    fill(out, outs, kPoison);
    const auto expect = [&](size_t block, float what) {
      fill(expected_.data() + block * count, count, what);
    };
    const auto sum = [&](size_t block) {
      float total = 0;
      for (size_t r = 0; r < n; ++r) total += value(r, block);
      return total;
    };
    out_ = out;
    switch (kind) {
      case 0:
        expect(0, sum(0));
        works_.push_back(comm.all_reduce_async(in, out, count, DataType::kF32, ReduceOp::kSum));
        return;
      case 1:
        expect(0, value(from, 0));
        works_.push_back(
            comm.broadcast_async(in, out, count, DataType::kF32, static_cast<int>(from)));
        return;
      case 2:
        expect(0, sum(me));
        works_.push_back(comm.reduce_scatter_async(in, out, count, DataType::kF32, ReduceOp::kSum));
        return;
      case 3:
        for (size_t r = 0; r < n; ++r) expect(r, value(r, 0));
        works_.push_back(comm.all_gather_async(in, out, count, DataType::kF32));
        return;
      case 4:
        for (size_t r = 0; r < n; ++r) expect(r, value(r, me));
        works_.push_back(comm.all_to_all_async(in, out, count, DataType::kF32));
        return;
      case 5:
        if (me == from) expect(0, sum(0));
        works_.push_back(comm.reduce_async(in, out, count, DataType::kF32, ReduceOp::kSum,
                                           static_cast<int>(from)));
        return;
      case 6:
        for (size_t r = 0; r < n && me == from; ++r) expect(r, value(r, 0));
        works_.push_back(comm.gather_async(in, out, count, DataType::kF32, static_cast<int>(from)));
        return;
      case 7:
        expect(0, value(from, me));
        works_.push_back(
            comm.scatter_async(in, out, count, DataType::kF32, static_cast<int>(from)));
        return;
      default:
        if (n == 1) {
          works_.push_back(comm.barrier_async());
          return;
        }
        expect(0, value((me + n - 1) % n, 0));
        works_.push_back(
            comm.receive_async(out, count, DataType::kF32, static_cast<int>((me + n - 1) % n)));
        if (!works_.back().ok()) return;
        works_.push_back(
            comm.send_async(in, count, DataType::kF32, static_cast<int>((me + 1) % n)));
    }
  }
  ~SimCall() {
    if (pool_.data != nullptr) endpoint_->free(pool_);
  }
  SimCall(const SimCall&) = delete;
  SimCall& operator=(const SimCall&) = delete;

  // Looks how far it is; true once it has ended. From then on its memory is in other use.
  bool ended(Communicator& comm) {
    if (ended_) return true;
    for (; next_ < works_.size(); ++next_) {
      if (!works_[next_].ok()) {
        status_.Update(works_[next_].status());
        continue;
      }
      const auto result = comm.test(*works_[next_]);
      if (!result.has_value()) return false;
      status_.Update(*result);
    }
    end();
    return true;
  }
  // Its communicator was destroyed, which ends it too.
  void abandon(const absl::Status& why) {
    if (ended_) return;
    status_.Update(why);
    end();
  }
  bool ended() const { return ended_; }
  const absl::Status& status() const { return status_; }
  void check_nothing_came_late() const {
    if (!ended_) return;
    if (floats_ == 0 || (data_[0] == kPoison && same(data_, data_ + 1, floats_ - 1))) return;
    for (size_t i = 0; i < floats_; ++i) ASSERT_EQ(data_[i], kPoison) << "late bytes, at " << i;
  }

 private:
  static constexpr float kPoison = -77;
  // Tests are not optimised: what goes through all bytes is the library's.
  static bool same(const float* a, const float* b, size_t count) {
    return std::memcmp(a, b, count * sizeof(float)) == 0;
  }
  static void fill(float* out, size_t count, float what) {
    for (size_t done = 0; done < count; done = std::max<size_t>(2 * done, 1)) {
      if (done == 0) out[0] = what;
      if (done > 0) std::memcpy(out + done, out, std::min(done, count - done) * sizeof(float));
    }
  }
  static float value(size_t rank, size_t block) {
    return static_cast<float>(1 + rank * 10 + block);
  }
  void allocate(size_t floats, bool pool) {
    floats_ = floats;
    if (pool) {
      pool_ = must(endpoint_->allocate(floats * sizeof(float)));
      data_ = reinterpret_cast<float*>(pool_.data);
    } else {
      heap_.resize(floats);
      data_ = heap_.data();
    }
  }
  void end() {
    ended_ = true;
    const bool right = same(out_, expected_.data(), expected_.size());
    for (size_t i = 0; status_.ok() && !right && i < expected_.size(); ++i) {
      if (out_[i] == expected_[i]) continue;
      ADD_FAILURE() << "a wrong result: " << out_[i] << " instead of " << expected_[i] << " at "
                    << i << " of " << expected_.size();
      break;
    }
    fill(data_, floats_, kPoison);
  }

  std::shared_ptr<Endpoint> endpoint_;
  CommBuffer pool_;
  std::vector<float> heap_;
  float* data_ = nullptr;
  size_t floats_ = 0;
  float* out_ = nullptr;
  std::vector<float> expected_;
  std::vector<absl::StatusOr<Work>> works_;
  size_t next_ = 0;
  bool ended_ = false;
  absl::Status status_;
};

}  // namespace baton
