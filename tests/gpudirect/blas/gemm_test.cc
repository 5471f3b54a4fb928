// Products by cuBLASLt and by our own kernel: who multiplies what, and that rows keep their bits. A
// stand-in for the library multiplies, in the emulation's order.
#include "gpudirect/blas/gpu_gemm.h"
#include "tests/engine_model/reference_kernels.h"
#include "tests/gpudirect/fake/with_device.h"
#include "tests/gpudirect/kernel_rig.h"
#include "tests/gpudirect/kernels/emulated_memory.h"
#include "tests/test.h"

namespace baton::gpudirect {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Layout {
  int type;
  uint64_t rows, columns;
  int64_t stride;
};
// The one library there is at a time, and how it behaves.
struct FakeBlas {
  FakeDriver* driver = nullptr;
  std::set<const void*> objects;
  bool transposed = false;
  int products = 0;
  int algorithms = 3;        // the first splits sums, the second needs a workspace
  bool rows_differ = false;  // an algorithm that is another for many rows
  uint64_t most_rows = 1 << 20;
  static FakeBlas* current;
};
FakeBlas* FakeBlas::current = nullptr;

template <class T, class... Values>
int make(void** out, Values... values) {
  *out = new T{values...};
  FakeBlas::current->objects.insert(*out);
  return 0;
}
template <class T>
int unmake(void* object) {
  if (FakeBlas::current->objects.erase(object) == 0) return 7;
  delete static_cast<T*>(object);
  return 0;
}

int matmul(BlasHandle, BlasDescription, const void* alpha, const void* a, BlasLayout of_a,
           const void* b, BlasLayout of_b, const void* beta, const void* c, BlasLayout, void* d,
           BlasLayout of_d, const BlasAlgorithm* algorithm, void*, size_t bytes, Stream) {
  FakeBlas& blas = *FakeBlas::current;
  const auto &w = *static_cast<const Layout*>(of_a), &rows = *static_cast<const Layout*>(of_b),
             &out = *static_cast<const Layout*>(of_d);
  if (!blas.transposed || *static_cast<const float*>(alpha) != 1 || c != d || bytes != 0 ||
      algorithm->data[0] != 2 || w.type != kRealBf16 || rows.type != kRealBf16 ||
      out.type != kRealFloat || w.rows != rows.rows || out.rows != w.columns ||
      out.columns != rows.columns) {
    return 13;
  }
  ++blas.products;
  blas.driver->run_all();  // a GPU may be as quick as that
  const auto at = [](const void* of) { return reinterpret_cast<DevicePointer>(of); };
  const auto k = static_cast<int>(w.rows), n = static_cast<int>(w.columns),
             m = static_cast<int>(rows.columns);
  const auto* halves = reinterpret_cast<const uint16_t*>(
      blas.driver->view(at(b), rows.rows * rows.columns * sizeof(uint16_t)));
  std::vector<float> wide;
  for (size_t i = 0; i < rows.rows * rows.columns; ++i) {
    wide.push_back(engine::float_from_bf16(halves[i]));
  }
  if (blas.rows_differ && m > 64) wide[0] += 1;
  engine::reference_gemm_bf16(
      m, n, k, wide.data(), rows.rows,
      reinterpret_cast<const uint16_t*>(blas.driver->view(at(a), w.rows * w.columns * 2)),
      reinterpret_cast<float*>(blas.driver->view(
          at(d), ((out.columns - 1) * static_cast<size_t>(out.stride) + out.rows) * sizeof(float))),
      static_cast<size_t>(out.stride), *static_cast<const float*>(beta) != 0);
  return 0;
}

CublasLt table_of(FakeBlas& blas) {
  FakeBlas::current = &blas;
  CublasLt table;
  table.cublasLtGetVersion = [] { return size_t{130002}; };
  table.cublasLtCreate = [](BlasHandle* out) { return make<int>(out); };
  table.cublasLtDestroy = unmake<int>;
  table.cublasLtMatmulDescCreate = [](BlasDescription* out, int compute, int scale) {
    return compute == kComputeFloat && scale == kRealFloat ? make<int>(out) : 7;
  };
  table.cublasLtMatmulDescDestroy = unmake<int>;
  table.cublasLtMatmulDescSetAttribute = [](BlasDescription, int attribute, const void* value,
                                            size_t) {
    FakeBlas::current->transposed =
        attribute == kTransposeA && *static_cast<const int32_t*>(value) == kTransposed;
    return 0;
  };
  table.cublasLtMatrixLayoutCreate = [](BlasLayout* out, int type, uint64_t rows, uint64_t columns,
                                        int64_t stride) {
    return make<Layout>(out, type, rows, columns, stride);
  };
  table.cublasLtMatrixLayoutDestroy = unmake<Layout>;
  table.cublasLtMatmulPreferenceCreate = [](BlasPreference* out) { return make<int>(out); };
  table.cublasLtMatmulPreferenceDestroy = unmake<int>;
  table.cublasLtMatmulPreferenceSetAttribute = [](BlasPreference, int, const void*, size_t) {
    return 0;
  };
  table.cublasLtMatmulAlgoGetHeuristic = [](BlasHandle, BlasDescription, BlasLayout, BlasLayout,
                                            BlasLayout, BlasLayout, BlasPreference, int wanted,
                                            BlasChoice* choices, int* found) {
    *found = std::min(wanted, FakeBlas::current->algorithms);
    for (int i = 0; i < *found; ++i) {
      choices[i] = {};
      choices[i].algorithm.data[0] = static_cast<uint64_t>(i);
      choices[i].workspace = i == 1 ? 4096 : 0;
    }
    return 0;
  };
  table.cublasLtMatmulAlgoConfigGetAttribute = [](const BlasAlgorithm* algorithm, int, void* value,
                                                  size_t bytes, size_t* written) {
    const int32_t splits = algorithm->data[0] == 0 ? 4 : 1;
    std::memcpy(value, &splits, *written = bytes);
    return 0;
  };
  table.cublasLtMatmulAlgoCheck = [](BlasHandle, BlasDescription, BlasLayout, BlasLayout b,
                                     BlasLayout, BlasLayout, const BlasAlgorithm*, BlasChoice*) {
    return static_cast<const Layout*>(b)->columns <= FakeBlas::current->most_rows ? 0 : 15;
  };
  table.cublasLtMatmul = matmul;
  return table;
}

class GpuGemmTest : public WithDevice {
 protected:
  static constexpr uint32_t kN = 40, kK = 48, kRows = 70;
  void SetUp() override {
    blas_.driver = &fake_;
    table_ = table_of(blas_);
    for (const float value : normal(kN * kK, 1)) w_.push_back(engine::bf16_from_float(value));
    a_ = normal(kRows * kK, 2);
    c_ = normal(kRows * kN, 3);
    w_at_ = rig_.allocate(w_.size() * 2);
    a_at_ = rig_.allocate(a_.size() * 4);
    c_at_ = rig_.allocate(c_.size() * 4);
    rig_.upload(w_at_, w_.data(), w_.size() * 2);
    rig_.upload(a_at_, a_.data(), a_.size() * 4);
  }
  void TearDown() override {
    gemm_ = nullptr;
    EXPECT_THAT(blas_.objects, IsEmpty());
  }
  void make_gemm(const absl::StatusOr<const CublasLt*>& table) {
    const Device::Current current(*device_);
    gemm_ = must(GpuGemm::make(*device_, *launcher_, rig_.stream(), table, kRows, kK));
    must(gemm_->pin(kN, kK, pointer_of<const uint16_t>(w_at_)));
    blas_.products = 0;
  }
  // The product of so many rows, onto c or not, beside the plain loops.
  void expect_product(uint32_t m, bool accumulate) {
    rig_.upload(c_at_, c_.data(), c_.size() * 4);
    {
      const Device::Current current(*device_);
      must(gemm_->multiply({.a = pointer_of<const float>(a_at_),
                            .w = pointer_of<const uint16_t>(w_at_),
                            .c = pointer_of<float>(c_at_),
                            .m = m,
                            .n = kN,
                            .k = kK,
                            .lda = kK,
                            .ldc = kN,
                            .accumulate = accumulate ? 1u : 0u}));
    }
    std::vector<float> ours(c_.size()), wanted = c_;
    rig_.download(ours.data(), c_at_, ours.size() * 4);
    engine::reference_gemm_bf16(static_cast<int>(m), kN, kK, a_.data(), kK, w_.data(),
                                wanted.data(), kN, accumulate);
    EXPECT_EQ(ours, wanted) << m;
  }

  FakeBlas blas_;
  CublasLt table_;
  KernelRig rig_{*device_, 2 << 20};
  std::unique_ptr<GpuGemm> gemm_;
  std::vector<uint16_t> w_;
  std::vector<float> a_, c_;
  DevicePointer w_at_ = 0, a_at_ = 0, c_at_ = 0;
};

TEST_F(GpuGemmTest, CublasLtMultipliesByTheFirstAlgorithmThatKeepsRowsBits) {
  make_gemm(&table_);
  EXPECT_EQ(gemm_->explain(), "cuBLASLt 13.0 multiplies 1 of 1 shapes");
  expect_product(1, false);
  expect_product(kRows, true);
  EXPECT_EQ(blas_.products, 2);
}

TEST_F(GpuGemmTest, WithoutTheLibraryOurKernelMultiplies) {
  make_gemm(absl::UnavailableError("there is none"));
  EXPECT_EQ(gemm_->explain(), "Baton's own kernel multiplies: there is none");
  expect_product(kRows, true);
  expect_product(3, false);
  EXPECT_EQ(blas_.products, 0);
}

// There is no room for them in bf16.
TEST_F(GpuGemmTest, MoreRowsThanWereSaidAreRefused) {
  make_gemm(absl::UnavailableError("there is none"));
  const Device::Current current(*device_);
  const absl::Status status = gemm_->multiply({.m = kRows + 1, .n = kN, .k = kK});
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("at most 70 and 48 were declared"));
}

TEST_F(GpuGemmTest, ALibraryThatDoesNotStartIsSaidAndLeft) {
  table_.cublasLtCreate = [](BlasHandle*) { return 1; };
  make_gemm(&table_);
  EXPECT_THAT(gemm_->explain(), HasSubstr("cublasLtCreate of cuBLASLt failed with status 1"));
  expect_product(kRows, false);
}

TEST_F(GpuGemmTest, AnAlgorithmThatChangesRowsInABatchIsFoundOut) {
  blas_.rows_differ = true;
  make_gemm(&table_);
  EXPECT_THAT(
      gemm_->explain(),
      HasSubstr(
          "40 x 48: Baton's own kernel, because its rows have different bits among 65 than alone"));
  expect_product(kRows, false);
  EXPECT_EQ(blas_.products, 0);
}

TEST_F(GpuGemmTest, NoAlgorithmThatFitsIsNoError) {
  blas_.algorithms = 2;
  make_gemm(&table_);
  EXPECT_THAT(gemm_->explain(),
              HasSubstr("0 of 1 shapes; 40 x 48: Baton's own kernel, because it has "
                        "no algorithm"));
  expect_product(3, false);
  gemm_ = nullptr;
  blas_.algorithms = 3;
  blas_.most_rows = 64;  // and the model has more
  make_gemm(&table_);
  EXPECT_THAT(gemm_->explain(), HasSubstr("0 of 1 shapes"));
}

TEST(CublasLt, ALibraryThatIsNotThereIsSaidInALine) {
  const auto missing = load_cublaslt("libcublasLt.so.0");
  EXPECT_TRUE(absl::IsUnavailable(missing.status()));
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("libcublasLt.so.0"));
  const auto other = load_cublaslt("libc.so.6");
  EXPECT_THAT(std::string(other.status().message()), HasSubstr("has no cublasLt"));
}

}  // namespace
}  // namespace baton::gpudirect
