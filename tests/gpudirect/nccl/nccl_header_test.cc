// Our declarations of NCCL's calls against those of its own header, where there is one.
#if __has_include(<nccl.h>)
#include <nccl.h>
#endif

#include <type_traits>

#include "bench/baselines/nccl_api.h"
#include "tests/test.h"

namespace baton::baselines {
namespace {

TEST(Toolkit, NcclsDeclarationsAreTheSame) {
#if __has_include(<nccl.h>)
  static_assert(static_cast<int>(NcclResult::kSuccess) == ncclSuccess);
  static_assert(static_cast<int>(NcclType::kI8) == ncclInt8);
  static_assert(static_cast<int>(NcclType::kU8) == ncclUint8);
  static_assert(static_cast<int>(NcclType::kI32) == ncclInt32);
  static_assert(static_cast<int>(NcclType::kU32) == ncclUint32);
  static_assert(static_cast<int>(NcclType::kI64) == ncclInt64);
  static_assert(static_cast<int>(NcclType::kU64) == ncclUint64);
  static_assert(static_cast<int>(NcclType::kF16) == ncclFloat16);
  static_assert(static_cast<int>(NcclType::kF32) == ncclFloat32);
  static_assert(static_cast<int>(NcclType::kF64) == ncclFloat64);
  static_assert(static_cast<int>(NcclType::kBF16) == ncclBfloat16);
  static_assert(static_cast<int>(NcclOp::kSum) == ncclSum);
  static_assert(static_cast<int>(NcclOp::kProd) == ncclProd);
  static_assert(static_cast<int>(NcclOp::kMax) == ncclMax);
  static_assert(static_cast<int>(NcclOp::kMin) == ncclMin);
  static_assert(static_cast<int>(NcclOp::kAvg) == ncclAvg);
  // Calls with our arguments would be calls of theirs: handles and numbers are passed alike.
  const auto theirs = [](NcclType type) { return static_cast<ncclDataType_t>(type); };
  const auto op = [](NcclOp value) { return static_cast<ncclRedOp_t>(value); };
  const auto comm = [](NcclComm value) { return reinterpret_cast<ncclComm_t>(value); };
  const auto stream = [](NcclStream value) { return static_cast<cudaStream_t>(value); };
  static_assert(sizeof(ncclComm_t) == sizeof(NcclComm) && sizeof(ncclRedOp_t) == sizeof(NcclOp));
  static_assert(
      std::is_same_v<decltype(ncclAllReduce(nullptr, nullptr, size_t{}, theirs(NcclType::kF32),
                                            op(NcclOp::kSum), comm(nullptr), stream(nullptr))),
                     ncclResult_t>);
  static_assert(std::is_same_v<decltype(&ncclReduceScatter), decltype(&ncclAllReduce)>);
  static_assert(std::is_same_v<decltype(&ncclAllGather),
                               ncclResult_t (*)(const void*, void*, size_t, ncclDataType_t,
                                                ncclComm_t, cudaStream_t)>);
  static_assert(std::is_same_v<decltype(&ncclBroadcast),
                               ncclResult_t (*)(const void*, void*, size_t, ncclDataType_t, int,
                                                ncclComm_t, cudaStream_t)>);
  static_assert(std::is_same_v<decltype(&ncclReduce),
                               ncclResult_t (*)(const void*, void*, size_t, ncclDataType_t,
                                                ncclRedOp_t, int, ncclComm_t, cudaStream_t)>);
  static_assert(
      std::is_same_v<decltype(&ncclSend), ncclResult_t (*)(const void*, size_t, ncclDataType_t, int,
                                                           ncclComm_t, cudaStream_t)>);
  static_assert(
      std::is_same_v<decltype(&ncclRecv), ncclResult_t (*)(void*, size_t, ncclDataType_t, int,
                                                           ncclComm_t, cudaStream_t)>);
  static_assert(
      std::is_same_v<decltype(&ncclCommInitAll), ncclResult_t (*)(ncclComm_t*, int, const int*)>);
#else
  GTEST_SKIP() << "no nccl.h here";
#endif
}

}  // namespace
}  // namespace baton::baselines
