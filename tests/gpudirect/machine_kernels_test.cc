// The kernels on this machine's GPU: to the bit as their emulation, and their times.
#include "gpudirect/copies/copier.h"
#include "tests/gpudirect/kernel_rig.h"
#include "tests/gpudirect/machine/with_kernels.h"
#include "tests/test.h"

namespace baton::gpudirect {
namespace {

using ::testing::IsEmpty;

using KernelsOnThisMachine = WithKernelsOfThisMachine;

// Promise(devices): Kernels compute the bits of the CPU's code | one source; multiply-adds are
//   fused only where written
TEST_F(KernelsOnThisMachine, WriteWhatTheirEmulationWrites) {
  const auto rig = KernelRig::make(*device_, 64 << 20);
  ASSERT_TRUE(rig.ok()) << rig.status();
  EXPECT_THAT(compare_kernels(**rig, *launcher_), IsEmpty());
}

TEST_F(KernelsOnThisMachine, Times) {
  const auto rig = KernelRig::make(*device_, size_t{2} << 30);
  ASSERT_TRUE(rig.ok()) << rig.status();
  const absl::StatusOr<const CublasLt*> blas = machine_cublaslt();
  if (!blas.ok()) std::printf("no rows of cuBLASLt: %s\n", blas.status().ToString().c_str());
  const auto rows = time_kernels(**rig, *launcher_, 512 << 20, 20, blas.ok() ? *blas : nullptr);
  ASSERT_TRUE(rows.ok()) << rows.status();
  for (const KernelRow& row : *rows) std::printf("row %s\n", json_of(row).c_str());
}

// What each way costs here.
TEST_F(KernelsOnThisMachine, WaysToCopyPages) {
  auto copier = Copier::open(*device_, launcher_.get(), device_->stream(Direction::kToHost));
  ASSERT_TRUE(copier.ok()) << copier.status();
  ASSERT_TRUE((*copier)->measure().ok());
  for (const CopyRoute route : {CopyRoute::kToHost, CopyRoute::kToDevice, CopyRoute::kOnDevice}) {
    for (const size_t size : {1024u, 4096u, 16384u, 65536u}) {
      std::vector<CopyPiece> pieces;
      for (size_t i = 0; i < 1024; ++i) pieces.push_back({i * 2 * size, i * size, size});
      if (route == CopyRoute::kToDevice) {
        for (CopyPiece& piece : pieces) std::swap(piece.from, piece.to);
      }
      std::printf("%s\n", (*copier)->explain(route, pieces).c_str());
    }
  }
}

}  // namespace
}  // namespace baton::gpudirect
