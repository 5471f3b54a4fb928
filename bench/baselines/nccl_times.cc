// NCCL's calls from one thread, on a stream of each device.
#include "bench/baselines/nccl_times.h"

#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/baselines/nccl_api.h"
#include "collectives/types.h"
#include "gpudirect/device.h"
#include "gpudirect/kernels/arithmetic-inl.h"
#include "transport/internal/device_memory.h"

namespace baton::baselines {
namespace {

using gpudirect::Device;

constexpr std::chrono::seconds kPatience{60};

std::optional<NcclType> type_of(DataType type) {
  switch (type) {
    case DataType::kF32:
      return NcclType::kF32;
    case DataType::kF16:
      return NcclType::kF16;
    case DataType::kBF16:
      return NcclType::kBF16;
    case DataType::kF64:
      return NcclType::kF64;
    case DataType::kI8:
      return NcclType::kI8;
    case DataType::kU8:
      return NcclType::kU8;
    case DataType::kI32:
      return NcclType::kI32;
    case DataType::kI64:
      return NcclType::kI64;
    case DataType::kU32:
      return NcclType::kU32;
    case DataType::kU64:
      return NcclType::kU64;
    case DataType::kF8E4M3:
    case DataType::kF8E5M2:
    case DataType::kBool:
      break;
  }
  return std::nullopt;
}

constexpr bool has(ReduceOp op) { return op <= ReduceOp::kAvg; }
NcclOp op_of(ReduceOp op) {
  constexpr NcclOp kOps[] = {NcclOp::kSum, NcclOp::kProd, NcclOp::kMin, NcclOp::kMax, NcclOp::kAvg};
  return kOps[static_cast<size_t>(op)];
}

// A vector of one small number, which every type has.
std::vector<std::byte> vector_of(DataType type, size_t count, int value) {
  const size_t element = size_of(type);
  uint64_t bits = static_cast<uint64_t>(value);
  if (type == DataType::kF32) bits = gpudirect::kernels::bits_of(static_cast<float>(value));
  if (type == DataType::kF16) bits = gpudirect::kernels::to_f16(static_cast<float>(value));
  if (type == DataType::kBF16) bits = gpudirect::kernels::to_bf16(static_cast<float>(value));
  if (type == DataType::kF64) bits = __builtin_bit_cast(uint64_t, static_cast<double>(value));
  std::vector<std::byte> out(count * element);
  for (size_t i = 0; i < count; ++i) std::memcpy(out.data() + i * element, &bits, element);
  return out;
}

struct Rank {
  std::unique_ptr<Device> device;
  std::unique_ptr<internal::DeviceBuffer> in, out;
  NcclComm comm = nullptr;

  NcclStream stream() const { return device->stream(gpudirect::Direction::kBetween); }
};

// What a call is: of the job's words.
struct Call {
  Collective collective{};
  DataType type{};
  ReduceOp op{};
  int root = 0;
  size_t count = 0;

  bool gathers() const {
    return collective == Collective::kAllGather || collective == Collective::kAllToAll;
  }
  bool scatters() const {
    return collective == Collective::kReduceScatter || collective == Collective::kAllToAll;
  }
};

absl::StatusOr<Call> call_of(const Job& job, size_t count) {
  Call call{.root = job.root, .count = count};
  const auto type = parse_data_type(job.type);
  const auto op = parse_reduce_op(job.op);
  if (!type.ok()) return type.status();
  if (!op.ok()) return op.status();
  if (!type_of(*type) || !has(*op)) {
    return absl::UnimplementedError(
        absl::StrCat("NCCL is not measured by ", job.op, " of ", job.type));
  }
  call.type = *type;
  call.op = *op;
  for (const Collective collective :
       {Collective::kAllReduce, Collective::kReduceScatter, Collective::kAllGather,
        Collective::kBroadcast, Collective::kReduce, Collective::kAllToAll}) {
    if (job.collective != name_of(collective)) continue;
    call.collective = collective;
    return call;
  }
  return absl::UnimplementedError(absl::StrCat("NCCL is not measured by ", job.collective));
}

}  // namespace

class NcclGroup::Impl {
 public:
  ~Impl() {
    for (Rank& rank : ranks_) {
      const Device::Current current(*rank.device);
      if (rank.comm != nullptr) api_.ncclCommDestroy(rank.comm);
    }
  }

  absl::Status start(int ranks) {
    const auto count = internal::device_memory()->count();
    if (!count.ok()) return count.status();
    if (*count < ranks) {
      return absl::FailedPreconditionError(
          *count == 1
              ? "one GPU: NCCL needs one per rank"
              : absl::StrFormat("%d GPUs for %d ranks: NCCL needs one per rank", *count, ranks));
    }
    auto api = NcclApi::load();
    if (!api.ok()) return api.status();
    api_ = *api;
    const auto driver = gpudirect::machine_driver();
    if (!driver.ok()) return driver.status();
    for (int ordinal = 0; ordinal < ranks; ++ordinal) {
      auto device = Device::open(**driver, ordinal);
      if (!device.ok()) return device.status();
      ranks_.emplace_back().device = *std::move(device);
    }
    std::vector<int> devices(ranks_.size());
    std::iota(devices.begin(), devices.end(), 0);
    std::vector<NcclComm> comms(ranks_.size());
    const absl::Status status =
        check(api_.ncclCommInitAll(comms.data(), ranks, devices.data()), "ncclCommInitAll");
    for (size_t r = 0; status.ok() && r < ranks_.size(); ++r) ranks_[r].comm = comms[r];
    return status;
  }

  absl::StatusOr<std::vector<double>> times(const Job& job, size_t count) {
    const auto call = call_of(job, count);
    if (!call.ok()) return call.status();
    absl::Status status = fill(*call);
    if (status.ok()) status = run(*call);
    if (status.ok()) status = look(*call);
    std::vector<double> us(static_cast<size_t>(job.iterations));
    if (!status.ok()) return status;
    time_calls(
        job, [&] { status.Update(run(*call)); }, [] {}, us.data());
    if (!status.ok()) return status;
    return us;
  }

 private:
  absl::Status check(NcclResult result, const char* what) const {
    if (result == NcclResult::kSuccess) return absl::OkStatus();
    return absl::UnavailableError(absl::StrCat(what, ": ", api_.ncclGetErrorString(result)));
  }

  // Every rank sends its number, counted from 1.
  absl::Status fill(const Call& call) {
    const size_t n = ranks_.size(), bytes = call.count * size_of(call.type);
    for (size_t r = 0; r < n; ++r) {
      Rank& rank = ranks_[r];
      const auto ordinal = static_cast<int>(r);
      rank.in.reset();
      rank.out.reset();
      auto in = internal::device_memory()->allocate(ordinal, bytes * (call.scatters() ? n : 1));
      if (!in.ok()) return in.status();
      auto out = internal::device_memory()->allocate(ordinal, bytes * (call.gathers() ? n : 1));
      if (!out.ok()) return out.status();
      rank.in = *std::move(in);
      rank.out = *std::move(out);
      const size_t elements = call.count * (call.scatters() ? n : 1);
      const absl::Status status = rank.in->put(0, vector_of(call.type, elements, ordinal + 1));
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // One call at every rank, to its end.
  absl::Status run(const Call& call) {
    absl::Status status = check(api_.ncclGroupStart(), "ncclGroupStart");
    for (size_t r = 0; r < ranks_.size() && status.ok(); ++r) {
      status = check(begin(call, ranks_[r]), job_name(call));
    }
    status.Update(check(api_.ncclGroupEnd(), "ncclGroupEnd"));
    for (const Rank& rank : ranks_) status.Update(wait(rank));
    return status;
  }
  static const char* job_name(const Call& call) { return name_of(call.collective).data(); }

  NcclResult begin(const Call& call, const Rank& rank) const {
    const void* const in = rank.in->data();
    void* const out = rank.out->data();
    const NcclType type = *type_of(call.type);
    const NcclOp op = op_of(call.op);
    switch (call.collective) {
      case Collective::kReduceScatter:
        return api_.ncclReduceScatter(in, out, call.count, type, op, rank.comm, rank.stream());
      case Collective::kAllGather:
        return api_.ncclAllGather(in, out, call.count, type, rank.comm, rank.stream());
      case Collective::kBroadcast:
        return api_.ncclBroadcast(in, out, call.count, type, call.root, rank.comm, rank.stream());
      case Collective::kReduce:
        return api_.ncclReduce(in, out, call.count, type, op, call.root, rank.comm, rank.stream());
      case Collective::kAllToAll: {
        NcclResult result = NcclResult::kSuccess;
        for (size_t r = 0; r < ranks_.size() && result == NcclResult::kSuccess; ++r) {
          const size_t at = r * call.count * size_of(call.type);
          const auto peer = static_cast<int>(r);
          result =
              api_.ncclSend(rank.in->data() + at, call.count, type, peer, rank.comm, rank.stream());
          if (result != NcclResult::kSuccess) break;
          result = api_.ncclRecv(rank.out->data() + at, call.count, type, peer, rank.comm,
                                 rank.stream());
        }
        return result;
      }
      default:
        return api_.ncclAllReduce(in, out, call.count, type, op, rank.comm, rank.stream());
    }
  }

  static absl::Status wait(const Rank& rank) {
    const Device::Current current(*rank.device);
    if (!current.status().ok()) return current.status();
    const auto begin = std::chrono::steady_clock::now();
    while (true) {
      const auto result =
          rank.device->driver().cuStreamQuery(rank.device->stream(gpudirect::Direction::kBetween));
      if (result != gpudirect::kNotReady) return rank.device->check(result, "waiting for NCCL");
      if (std::chrono::steady_clock::now() - begin > kPatience) {
        return absl::DeadlineExceededError("a call of NCCL has not ended in 60 s");
      }
    }
  }

  // What is a sum, or is only moved, is looked at.
  absl::Status look(const Call& call) {
    const int n = static_cast<int>(ranks_.size());
    const bool reduces = !call.gathers() && call.collective != Collective::kBroadcast;
    if (reduces && call.op != ReduceOp::kSum) return absl::OkStatus();
    for (int r = 0; r < n; ++r) {
      if (call.collective == Collective::kReduce && r != call.root) continue;
      std::vector<std::byte> right;
      for (int block = 0; block < (call.gathers() ? n : 1); ++block) {
        const int value = call.gathers() ? block + 1 : reduces ? n * (n + 1) / 2 : call.root + 1;
        const std::vector<std::byte> one = vector_of(call.type, call.count, value);
        right.insert(right.end(), one.begin(), one.end());
      }
      std::vector<std::byte> got(right.size());
      const absl::Status status =
          ranks_[static_cast<size_t>(r)].out->get(0, {got.data(), got.size()});
      if (!status.ok()) return status;
      if (got != right) {
        return absl::DataLossError(absl::StrFormat("NCCL's %s is wrong at rank %d",
                                                   std::string(name_of(call.collective)), r));
      }
    }
    return absl::OkStatus();
  }

  NcclApi api_;
  std::vector<Rank> ranks_;
};

NcclGroup::NcclGroup(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
NcclGroup::~NcclGroup() = default;

absl::StatusOr<std::unique_ptr<NcclGroup>> NcclGroup::create(int ranks) {
  auto impl = std::make_unique<Impl>();
  if (absl::Status status = impl->start(ranks); !status.ok()) return status;
  return std::unique_ptr<NcclGroup>(new NcclGroup(std::move(impl)));
}

absl::StatusOr<std::vector<double>> NcclGroup::times(const Job& job, size_t count) {
  return impl_->times(job, count);
}

}  // namespace baton::baselines
