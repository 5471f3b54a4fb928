// Rows that a kernel makes fp8 of, part by part: long lists, slots beside each other, errors.
#include "gpudirect/contract/kernel_conversions.h"

#include "kvtransfer/kv_requantise.h"
#include "tests/gpudirect/fake/fake_driver.h"
#include "tests/test.h"
#include "tests/until.h"
#include "transport/clock.h"

namespace baton::gpudirect {
namespace {

using internal::RowBox;
using kvtransfer::fp8_e4m3_of;

class KernelConversionsTest : public testing::Test {
 protected:
  KernelConversionsTest() {
    device_ = *Device::open(FakeDriver::driver(), 0);
    launcher_ = *Launcher::load(*device_, FakeDriver::image());
    conversions_ = *KernelConversions::create(*device_, *launcher_);
  }
  absl::Status wait(size_t slot) {
    std::optional<absl::Status> ended;
    until([&] { return (ended = conversions_->ended(slot)).has_value(); });
    return *ended;
  }
  void expect_clean() {
    conversions_.reset();
    launcher_.reset();
    device_.reset();
    EXPECT_THAT(fake_.finish(), testing::IsEmpty());
  }

  FakeDriver fake_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Launcher> launcher_;
  std::unique_ptr<KernelConversions> conversions_;
};

// Boxes of a row or two in memory of the device, of two forms in turn: 8 numbers of bf16, 4 of
// fp32.
class Rows {
 public:
  Rows(FakeDriver& fake, size_t boxes, uint64_t seed) : fake_(fake), boxes_(boxes) {
    from_ = fake.allocate(boxes * kFrom);
    to_ = fake.allocate(boxes * kTo);
    scales_ = fake.allocate(boxes * kScales);
    std::mt19937_64 random(seed);
    std::vector<float> values(boxes * kFrom / 4);
    for (float& value : values) {  // its upper half is a number of bf16, as is its lower one
      const uint32_t bits = (random() % 0x7f000000u) & 0x7f7f7f7fu;
      std::memcpy(&value, &bits, 4);
    }
    std::memcpy(fake.view(from_, boxes * kFrom), values.data(), boxes * kFrom);
    std::memset(fake.view(to_, boxes * kTo), 0xee, boxes * kTo);
  }
  ~Rows() {
    for (const DevicePointer at : {from_, to_, scales_}) fake_.free(at);
  }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;

  std::vector<RowBox> boxes() const {
    std::vector<RowBox> out;
    for (size_t i = 0; i < boxes_; ++i) {
      RowBox box{.form = {.elements = elements(i), .span = elements(i), .is_fp32 = is_fp32(i)},
                 .from = pointer_of<const std::byte>(from_ + i * kFrom),
                 .to = pointer_of<std::byte>(to_ + i * kTo),
                 .scales = pointer_of<std::byte>(scales_ + i * kScales)};
      if (is_fp32(i)) box.form.from_element = 4;
      box.count[1] = rows(i);
      box.from_stride[1] = 16;
      box.to_stride[1] = 8;
      box.scale_stride[1] = 4;
      out.push_back(box);
    }
    return out;
  }

  void expect_converted() const {
    for (size_t i = 0; i < boxes_; ++i) {
      for (size_t row = 0; row < 2; ++row) {
        const std::byte* const to = fake_.view(to_ + i * kTo + row * 8, 8);
        if (row >= rows(i)) {
          ASSERT_EQ(to[0], std::byte{0xee}) << "box " << i << " has no row " << row;
          continue;
        }
        std::array<float, 8> values = {};
        for (size_t e = 0; e < elements(i); ++e) values[e] = value(i, row, e);
        const float largest = *std::max_element(values.begin(), values.end());
        const float scale = largest == 0 ? 1.0f : std::max(largest / 448.0f, 0x1p-126f);
        float written = 0;
        std::memcpy(&written, fake_.view(scales_ + i * kScales + row * 4, 4), 4);
        ASSERT_EQ(std::bit_cast<uint32_t>(written), std::bit_cast<uint32_t>(scale))
            << "box " << i << " row " << row;
        for (size_t e = 0; e < elements(i); ++e) {
          ASSERT_EQ(static_cast<uint8_t>(to[e]), fp8_e4m3_of(values[e] / scale))
              << "box " << i << " row " << row << " element " << e;
        }
      }
    }
  }

 private:
  static constexpr size_t kFrom = 32, kTo = 16, kScales = 8;  // bytes of a box
  static bool is_fp32(size_t box) { return box % 2 != 0; }
  static uint32_t elements(size_t box) { return is_fp32(box) ? 4 : 8; }
  static uint32_t rows(size_t box) { return 1 + box % 3 / 2; }
  float value(size_t box, size_t row, size_t element) const {
    uint32_t bits = 0;
    const size_t bytes = is_fp32(box) ? 4 : 2;
    const std::byte* const at = fake_.view(from_ + box * kFrom + row * 16 + element * bytes, bytes);
    std::memcpy(reinterpret_cast<std::byte*>(&bits) + 4 - bytes, at, bytes);
    float out = 0;
    std::memcpy(&out, &bits, 4);
    return out;
  }

  FakeDriver& fake_;
  const size_t boxes_;
  DevicePointer from_, to_, scales_;
};

TEST_F(KernelConversionsTest, ALongListGoesInParts) {
  {
    const Rows rows(fake_, 2 * KernelConversions::kShareBoxes + 3, 1);
    ASSERT_TRUE(conversions_->begin(0, rows.boxes()).ok());
    ASSERT_TRUE(wait(0).ok());
    rows.expect_converted();
    // Boxes of two forms, one behind the other, in three parts: the middle one has both.
    EXPECT_EQ(fake_.calls_of("cuMemcpyAsync"), 3u);
    EXPECT_EQ(fake_.calls_of("cuLaunchKernel"), 4u);
  }
  expect_clean();
}

TEST_F(KernelConversionsTest, AllSlotsAtOnceEachWithItsOwn) {
  {
    std::vector<std::unique_ptr<Rows>> rows;
    for (size_t slot = 0; slot < KernelConversions::kSlots; ++slot) {
      rows.push_back(std::make_unique<Rows>(fake_, 100 * slot + 7, slot));
      ASSERT_TRUE(conversions_->begin(slot, rows.back()->boxes()).ok());
    }
    for (size_t slot = rows.size(); slot-- > 0;) {
      ASSERT_TRUE(wait(slot).ok());
      rows[slot]->expect_converted();
    }
    // None, and nothing to end.
    ASSERT_TRUE(conversions_->begin(0, {}).ok());
    EXPECT_TRUE(wait(0).ok());
  }
  expect_clean();
}

TEST_F(KernelConversionsTest, TheEndOfThemWaitsForConversions) {
  {
    const Rows rows(fake_, 3 * KernelConversions::kShareBoxes, 1);
    ASSERT_TRUE(conversions_->begin(3, rows.boxes()).ok());
    conversions_.reset();
    EXPECT_LE(fake_.calls_of("cuMemcpyAsync"), 1u) << "parts behind the first are not begun";
  }
  expect_clean();
}

TEST_F(KernelConversionsTest, AnErrorIsToldAndTheNextOneWorks) {
  {
    const Rows rows(fake_, KernelConversions::kShareBoxes + 1, 1);
    for (const char* call : {"cuMemcpyAsync", "cuLaunchKernel", "cuEventRecord"}) {
      for (const size_t after : {0, 1}) {
        fake_.fail_next(call, kNotSupported, 1, after);
        absl::Status status = conversions_->begin(0, rows.boxes());
        if (status.ok()) status = wait(0);
        EXPECT_THAT(std::string(status.message()), testing::HasSubstr("fake")) << call << after;
      }
    }
    ASSERT_TRUE(conversions_->begin(0, rows.boxes()).ok());
    ASSERT_TRUE(wait(0).ok());
    rows.expect_converted();
  }
  expect_clean();
}

// What is asked may fail while the kernel runs: nobody is told that the rows are his again before
// there is no hope of an answer.
TEST_F(KernelConversionsTest, QuestionsThatFailDoNotEndIt) {
  {
    const Rows rows(fake_, 8, 1);
    const Time begin = Clock::steady().now();
    fake_.fail_next("cuEventQuery", kNotSupported, SIZE_MAX);
    ASSERT_TRUE(conversions_->begin(0, rows.boxes()).ok());
    EXPECT_FALSE(wait(0).ok());
    EXPECT_GE(Clock::steady().now() - begin, std::chrono::seconds(1));
    fake_.fail_next("cuEventQuery", kSuccess, 0);
    ASSERT_TRUE(conversions_->begin(0, rows.boxes()).ok());
    ASSERT_TRUE(wait(0).ok());
    rows.expect_converted();
  }
  expect_clean();
}

TEST_F(KernelConversionsTest, ALostDeviceIsSaidAtOnce) {
  const Rows rows(fake_, 8, 1);
  fake_.fail_next("cuLaunchKernel", kIllegalAddress);
  EXPECT_FALSE(conversions_->begin(0, rows.boxes()).ok() && wait(0).ok());
  EXPECT_FALSE(conversions_->begin(0, rows.boxes()).ok()) << "the device is lost";
}

}  // namespace
}  // namespace baton::gpudirect
