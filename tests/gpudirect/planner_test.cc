// The planner: shapes, prices and choices; and over the fake, that every way moves the same bytes.
#include "gpudirect/copies/planner.h"

#include "gpudirect/copies/copier.h"
#include "tests/gpudirect/fake/fake_driver.h"
#include "tests/gpudirect/fake/made_up_costs.h"
#include "tests/test.h"

namespace baton::gpudirect {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr CopyWay kAll[] = {CopyWay::kSingle, CopyWay::kRows,   CopyWay::kBoxes,
                            CopyWay::kBatch,  CopyWay::kPacked, CopyWay::kKernel};
constexpr CopyRoute kRoutes[] = {CopyRoute::kToHost, CopyRoute::kToDevice, CopyRoute::kOnDevice};

TEST(Planner, NeighboursBecomeOnePiece) {
  std::vector<CopyPiece> out;
  merge_pieces(
      std::vector<CopyPiece>{{0, 100, 10}, {10, 110, 5}, {15, 120, 5}, {7, 7, 0}, {20, 125, 1}},
      out);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[0].bytes, 15u);
  EXPECT_EQ(out[1].bytes, 6u);
}

TEST(Planner, ShapesSayWhichWaysThereAre) {
  const std::vector<CopyPiece> even = {{0, 1000, 10}, {30, 1010, 10}, {60, 1020, 10}};
  CopyShape shape = shape_of(even);
  EXPECT_TRUE(shape.rows && shape.to_in_row && !shape.from_in_row);
  EXPECT_EQ(shape.bytes, 30u);
  EXPECT_TRUE(ways_for(CopyRoute::kToHost, shape).has(CopyWay::kPacked));
  EXPECT_FALSE(ways_for(CopyRoute::kToDevice, shape).has(CopyWay::kPacked));
  EXPECT_FALSE(ways_for(CopyRoute::kOnDevice, shape).has(CopyWay::kPacked));
  shape = shape_of(std::vector<CopyPiece>{{0, 1000, 10}, {30, 1010, 10}, {50, 1020, 10}});
  EXPECT_FALSE(shape.rows);
  shape = shape_of(std::vector<CopyPiece>{{60, 1000, 10}, {30, 1010, 10}, {0, 1020, 10}});
  EXPECT_FALSE(shape.rows) << "backwards";
  shape = shape_of(std::vector<CopyPiece>{{0, 1000, 10}, {30, 1010, 11}});
  EXPECT_FALSE(shape.rows) << "of two sizes";
  // No row may be further from the next one than the driver counts, also where there is none.
  EXPECT_TRUE(shape_of(std::vector<CopyPiece>{{0, 0, (1u << 31) - 1}}).rows);
  EXPECT_FALSE(shape_of(std::vector<CopyPiece>{{0, 0, 1u << 31}}).rows);
}

// `planes` of so many rows, one row in three; the planes at places that nothing orders at one end.
std::vector<CopyPiece> planes_of(DevicePointer from, DevicePointer to, size_t row, size_t rows,
                                 size_t planes) {
  std::vector<CopyPiece> out;
  for (size_t p = 0; p < planes; ++p) {
    const size_t place = p % 2 == 0 ? p : planes - p;  // there and back
    for (size_t r = 0; r < rows; ++r) {
      out.push_back({from + (place * rows + r) * 3 * row, to + (p * rows + r) * row, row});
    }
  }
  return out;
}

// The same, the planes at the source from the last to the first: no two of them are one box.
std::vector<CopyPiece> planes_backwards(DevicePointer from, DevicePointer to, size_t row,
                                        size_t rows, size_t planes) {
  std::vector<CopyPiece> out;
  for (size_t p = 0; p < planes; ++p) {
    for (size_t r = 0; r < rows; ++r) {
      out.push_back(
          {from + ((planes - 1 - p) * rows + r) * 3 * row, to + (p * rows + r) * row, row});
    }
  }
  return out;
}

TEST(Planner, PlanesOfRowsAreCopiedOneByOne) {
  std::vector<CopyPiece> planes = planes_of(0, 1 << 20, 10, 8, 6);
  CopyShape shape = shape_of(planes);
  EXPECT_FALSE(shape.rows);
  EXPECT_EQ(shape.plane, 8u);
  EXPECT_TRUE(ways_for(CopyRoute::kToHost, shape).has(CopyWay::kRows));
  EXPECT_EQ(shape_of(planes_of(0, 1 << 20, 10, 8, 1)).plane, 8u) << "one is rows";
  // A table in which a copy of 8 rows costs 100, whatever it is that costs in other ways.
  CopyTable table;
  for (const CopyWay way : kAll) {
    table.fill(CopyRoute::kToHost, way, [](size_t, size_t) { return 601.0; });
  }
  table.fill(CopyRoute::kToHost, CopyWay::kRows,
             [](size_t, size_t count) { return count <= 8 ? 100.0 : 1e6; });
  const CopyWays ways = ways_for(CopyRoute::kToHost, shape);
  EXPECT_EQ(cheapest(table, CopyRoute::kToHost, shape, ways), CopyWay::kRows);
  EXPECT_THAT(explain(table, CopyRoute::kToHost, shape, ways), HasSubstr("to host: rows 0.6 us, "));
  const std::vector<CopyPiece> seven = planes_of(0, 1 << 20, 10, 8, 7);
  EXPECT_NE(cheapest(table, CopyRoute::kToHost, shape_of(seven), ways), CopyWay::kRows);

  planes.pop_back();
  EXPECT_EQ(shape_of(planes).plane, 0u) << "the last one lacks a row";
  planes.push_back(planes[0]);
  EXPECT_EQ(shape_of(planes).plane, 0u) << "its last row is elsewhere";
  planes = planes_of(0, 1 << 20, 10, 8, 6);
  planes[20].bytes = 9;
  EXPECT_EQ(shape_of(planes).plane, 0u) << "a row is shorter";
  EXPECT_EQ(shape_of(planes_of(0, 1 << 20, 10, kLeastPlane - 1, 6)).plane, 0u) << "too few rows";
}

TEST(Planner, PlanesOfRowsMayGoInOneCall) {
  const CopyRoute route = CopyRoute::kToHost;
  const CopyShape planes = shape_of(planes_of(0, 1 << 20, 1024, 8, 6));
  const CopyWays ways = ways_for(route, planes);
  EXPECT_TRUE(ways.has(CopyWay::kBoxes));
  EXPECT_FALSE(ways_for(route, shape_of(planes_of(0, 1 << 20, 1024, 8, 1))).has(CopyWay::kBoxes))
      << "one plane is a call as it is";
  const CopyShape uneven{.pieces = 8, .bytes = 8000, .largest = 1024};
  EXPECT_FALSE(ways_for(route, uneven).has(CopyWay::kBoxes));
  // A call costs 1000, a plane 100 more in a batch, and each row 10 wherever it is.
  CopyTable table;
  for (const CopyWay way : kAll) table.fill(route, way, [](size_t, size_t) { return 1e9; });
  const auto of_count = [](double call, double piece) {
    return [=](size_t, size_t count) { return call + piece * static_cast<double>(count); };
  };
  table.fill(route, CopyWay::kRows, of_count(1000, 10));
  table.fill(route, CopyWay::kBoxes, of_count(1000, 10 + 100.0 / kLeastPlane));
  EXPECT_EQ(cheapest(table, route, planes, ways), CopyWay::kBoxes);
  // 6 planes of 8 rows: 1000 + 6 * (100 + 8 * 10), and a call for each 6 * (1000 + 8 * 10); but for
  // what the straight lines between the figures of the table make of it.
  EXPECT_THAT(explain(table, route, planes, ways), HasSubstr("to host: 3D batch 2.2 us, rows 6.5"));
  // Where the batch costs more than the calls that it saves, and where a driver has none.
  table.fill(route, CopyWay::kBoxes, of_count(7000, 10));
  EXPECT_EQ(cheapest(table, route, planes, ways), CopyWay::kRows);
  EXPECT_TRUE(table.why_left_out(CopyWay::kBoxes).empty());
  table.leave_out(CopyWay::kBoxes, "the driver says no");
  EXPECT_EQ(table.why_left_out(CopyWay::kBoxes), "the driver says no");
}

TEST(Planner, PricesLieBetweenThoseOfTheTable) {
  CopyTable table;
  // A power of the size, and one of the count: what straight lines in logarithms hit everywhere.
  const auto cost = [](size_t size, size_t count) {
    return 1000 * std::pow(static_cast<double>(size), 0.5) *
           std::pow(static_cast<double>(count), 0.25);
  };
  table.fill(CopyRoute::kToHost, CopyWay::kBatch, cost);
  const auto price = [&](size_t pieces, size_t size) {
    return table.nanoseconds(CopyRoute::kToHost, CopyWay::kBatch, pieces, pieces * size);
  };
  for (const size_t size : {1024u, 2560u, 4096u, 300'000u, 1u << 20}) {
    for (const size_t count : {1u, 2u, 4u, 9u, 1000u, 1024u}) {
      EXPECT_NEAR(price(count, size) / cost(size, count), 1, 1e-9) << count << " x " << size;
    }
  }
  EXPECT_DOUBLE_EQ(price(10, 16), price(10, 1024)) << "no cheaper than the smallest of the table";
  EXPECT_NEAR(price(2, 8 << 20) / price(2, 1 << 20), 8, 1e-9);
  EXPECT_NEAR(price(4096, 4096) / price(1024, 4096), 4, 1e-9);
  EXPECT_EQ(price(0, 0), 0);
  // A bend at one place of the table is nowhere else than beside it.
  table.set(CopyRoute::kToHost, CopyWay::kBatch, 2, 5, 7);
  EXPECT_NEAR(price(64, 16384), 7, 1e-9);
  EXPECT_LT(price(63, 16383), 10);
  EXPECT_NEAR(price(16, 16384) / cost(16384, 16), 1, 1e-9);
}

TEST(Planner, TheCheapestIsChosenWhereItCanBeTaken) {
  const CopyShape rows{
      .pieces = 8, .bytes = 8192, .largest = 1024, .rows = true, .to_in_row = true};
  for (const CopyWay way : kAll) {
    if (way == CopyWay::kBoxes) continue;  // is for planes
    EXPECT_EQ(cheapest(costs_that_favour(way), CopyRoute::kToHost, rows,
                       ways_for(CopyRoute::kToHost, rows)),
              way);
  }
  const CopyShape uneven{.pieces = 8, .bytes = 8000, .largest = 1024};
  EXPECT_NE(cheapest(costs_that_favour(CopyWay::kRows), CopyRoute::kToHost, uneven,
                     ways_for(CopyRoute::kToHost, uneven)),
            CopyWay::kRows);
  EXPECT_THAT(explain(costs_that_favour(CopyWay::kPacked), CopyRoute::kToHost, rows,
                      ways_for(CopyRoute::kToHost, rows)),
              HasSubstr("8 pieces, 8192 bytes, to host: packed 0.0 us, single 1000.0 us"));
}

class CopierTest : public testing::Test {
 protected:
  static constexpr size_t kBytes = 10 << 20;  // at each end: more than is packed at a time

  explicit CopierTest(FakeOptions options = {.memory_bytes = 64 << 20})
      : fake_(std::move(options)) {
    device_ = *Device::open(FakeDriver::driver(), 0);
    launcher_ = *Launcher::load(*device_, FakeDriver::image());
    auto copier = Copier::open(*device_, launcher_.get(), device_->stream(Direction::kToHost));
    EXPECT_TRUE(copier.ok()) << copier.status();
    copier_ = *std::move(copier);
    memory_ = fake_.allocate(2 * kBytes);
    host_.resize(kBytes);
    const Device::Current current(*device_);
    EXPECT_EQ(device_->driver().cuMemHostRegister(host_.data(), kBytes, kHostPortable), kSuccess);
  }
  ~CopierTest() override {
    fake_.run_all();
    {
      const Device::Current current(*device_);
      device_->driver().cuMemHostUnregister(host_.data());
    }
    fake_.free(memory_);
    copier_.reset();
    launcher_.reset();
    device_.reset();
    EXPECT_THAT(fake_.finish(), IsEmpty());
  }
  DevicePointer from(CopyRoute route) const {
    return route == CopyRoute::kToDevice ? address(host_) : memory_;
  }
  DevicePointer to(CopyRoute route) const {
    return route == CopyRoute::kToHost ? address(host_) : memory_ + kBytes;
  }
  static DevicePointer address(const std::string& host) {
    return static_cast<DevicePointer>(reinterpret_cast<uintptr_t>(host.data()));
  }
  // The bytes at an end, and other ones there.
  std::string bytes_at(DevicePointer at) {
    return at == address(host_) ? host_ : fake_.read(at, kBytes);
  }
  void fill(DevicePointer at, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::string bytes(kBytes, '\0');
    for (size_t i = 0; i < kBytes; i += 8) {
      const uint64_t word = random();
      std::copy_n(reinterpret_cast<const char*>(&word), 8, &bytes[i]);
    }
    if (at == address(host_)) {
      std::copy(bytes.begin(), bytes.end(), host_.begin());
    } else {
      fake_.write(at, bytes);
    }
  }
  // Copies and compares with a copy on the host.
  void expect_copied(CopyRoute route, const std::vector<CopyPiece>& pieces, const CopyWay* way) {
    const std::string source = bytes_at(from(route));
    std::string wanted = bytes_at(to(route));
    for (const CopyPiece& piece : pieces) {
      source.copy(&wanted[piece.to - to(route)], piece.bytes, piece.from - from(route));
    }
    const absl::Status status =
        way == nullptr ? copier_->copy(route, pieces) : copier_->copy_by(*way, route, pieces);
    ASSERT_TRUE(status.ok()) << status;
    fake_.run_all();
    EXPECT_TRUE(bytes_at(to(route)) == wanted);
  }

  FakeDriver fake_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Launcher> launcher_;
  std::unique_ptr<Copier> copier_;
  DevicePointer memory_ = 0;
  std::string host_;
};

// Pages of one size in any order at the source, in a row at the target.
std::vector<CopyPiece> pages(DevicePointer from, DevicePointer to, size_t page, size_t count,
                             std::mt19937_64& random) {
  std::vector<CopyPiece> out(count);
  for (size_t i = 0; i < count; ++i) out[i] = {from + 2 * i * page, to + i * page, page};
  for (size_t i = count; i > 1; --i) std::swap(out[i - 1].from, out[random() % i].from);
  return out;
}

TEST_F(CopierTest, EveryWayMovesTheSameBytes) {
  std::mt19937_64 random(1);
  for (const CopyRoute route : kRoutes) {
    fill(from(route), 1);
    for (const CopyWay way : kAll) {
      fill(to(route), 2);
      std::vector<CopyPiece> pieces = pages(from(route), to(route), 4096, 1100, random);
      if (way == CopyWay::kBoxes) {
        pieces = planes_of(from(route), to(route), 1024, 4, 275);
      } else if (way == CopyWay::kRows) {
        std::sort(pieces.begin(), pieces.end(),
                  [](const CopyPiece& a, const CopyPiece& b) { return a.from < b.from; });
        for (size_t i = 0; i < pieces.size(); ++i) pieces[i].to = to(route) + i * 4096;
      }
      if (route == CopyRoute::kToDevice &&
          way != CopyWay::kBoxes) {  // packed where the host's side is in a row
        for (CopyPiece& piece : pieces) {
          const DevicePointer place = piece.from - from(route);
          piece.from = from(route) + (piece.to - to(route));
          piece.to = to(route) + place;
        }
      }
      if (way == CopyWay::kPacked && route == CopyRoute::kOnDevice) {
        EXPECT_EQ(copier_->copy_by(way, route, pieces).code(),
                  absl::StatusCode::kFailedPrecondition);
        continue;
      }
      SCOPED_TRACE(std::string(name_of(route)) + " by " + std::string(name_of(way)));
      expect_copied(route, pieces, &way);
    }
  }
  EXPECT_LE(fake_.largest_copy(), Copier::kMostBytes);
}

TEST_F(CopierTest, PlanesOfRowsTakeACallEach) {
  const CopyWay rows = CopyWay::kRows;
  for (const CopyRoute route : kRoutes) {
    SCOPED_TRACE(name_of(route));
    fill(from(route), 1);
    for (const auto& [row, count, planes, calls] :
         std::vector<std::array<size_t, 4>>{{512, 16, 30, 30}, {96 << 10, 12, 3, 3}}) {
      fill(to(route), 2);
      const uint64_t before = fake_.calls_of("cuMemcpy2DAsync");
      expect_copied(route, planes_of(from(route), to(route), row, count, planes), &rows);
      EXPECT_EQ(fake_.calls_of("cuMemcpy2DAsync") - before, calls);
    }
  }
  // Planes of more than a copy may have.
  fill(to(CopyRoute::kToHost), 2);
  std::vector<CopyPiece> large;
  for (size_t i = 0; i < 10; ++i) {
    const DevicePointer gap = i < 5 ? 0 : 4096;
    large.push_back({from(CopyRoute::kToHost) + i * (1 << 20) + gap,
                     to(CopyRoute::kToHost) + i * (1 << 20), 1'000'000});
  }
  EXPECT_EQ(shape_of(large).plane, 5u);
  expect_copied(CopyRoute::kToHost, large, &rows);
  EXPECT_LE(fake_.largest_copy(), Copier::kMostBytes);
}

// Planes of random sizes in random places, in many calls and in few; of some the planes are at
// equal distances, and so one box.
TEST_F(CopierTest, PlanesGoInBatchesOfBoxes) {
  const CopyWay boxes = CopyWay::kBoxes;
  size_t copied = 0;
  for (uint64_t seed = 0; seed < 24; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const CopyRoute route = kRoutes[seed % 3];
    const size_t width = 1 + random() % 300;
    const size_t rows = kLeastPlane + random() % 20;
    const size_t from_pitch = width + random() % 50, to_pitch = width + random() % 50 + 1;
    const size_t most = (kBytes - 4096) / (rows * std::max(from_pitch, to_pitch));
    const size_t planes = std::min(most, 2 + random() % 2500);
    // Whole layers, or places that are none; the sources in any order.
    const size_t off = seed % 4 == 0 ? 0 : 1;
    std::vector<size_t> places(planes);
    for (size_t i = 0; i < planes; ++i) places[i] = i;
    if (seed % 2 == 1) std::shuffle(places.begin(), places.end(), random);
    const size_t apart = seed % 4 == 0 ? std::min<size_t>(most / planes, 2) : 1;
    std::vector<CopyPiece> pieces;
    for (size_t p = 0; p < planes; ++p) {
      for (size_t r = 0; r < rows; ++r) {
        const size_t gap = off * (places[p] % 7);
        pieces.push_back({from(route) + (places[p] * rows + r) * from_pitch + gap,
                          to(route) + (p * apart * rows + r) * to_pitch, width});
      }
    }
    std::vector<CopyPiece> merged;
    merge_pieces(pieces, merged);
    fill(from(route), seed);
    if (!ways_for(route, shape_of(merged)).has(boxes)) {
      EXPECT_EQ(copier_->copy_by(boxes, route, pieces).code(),
                absl::StatusCode::kFailedPrecondition);
      continue;
    }
    const uint64_t before = fake_.calls_of("cuMemcpy3DBatchAsync");
    expect_copied(route, pieces, &boxes);
    const uint64_t calls = fake_.calls_of("cuMemcpy3DBatchAsync") - before;
    ++copied;
    EXPECT_GE(calls, 1u);
    EXPECT_LE(calls, 1 + planes / Copier::kMostDescriptors + kBytes / (2 << 20));
  }
  EXPECT_LE(fake_.largest_copy(), Copier::kMostBytes);
  EXPECT_EQ(fake_.calls_of("cuMemcpy2DAsync"), 0u);
  EXPECT_GE(copied, 18u);  // of the others all planes are one
}

TEST_F(CopierTest, ABatchHas1024PlanesOr4MiB) {
  const CopyWay boxes = CopyWay::kBoxes;
  const auto calls = [&](CopyRoute route, const std::vector<CopyPiece>& pieces) {
    const uint64_t before = fake_.calls_of("cuMemcpy3DBatchAsync");
    fill(from(route), before);
    expect_copied(route, pieces, &boxes);
    return fake_.calls_of("cuMemcpy3DBatchAsync") - before;
  };
  const auto scattered = [&](CopyRoute route, size_t row, size_t rows, size_t planes) {
    return planes_backwards(from(route), to(route), row, rows, planes);
  };
  for (const CopyRoute route : kRoutes) {
    SCOPED_TRACE(name_of(route));
    EXPECT_EQ(calls(route, scattered(route, 64, 4, 1024)), 1u);
    EXPECT_EQ(calls(route, scattered(route, 64, 4, 1025)), 2u);
    EXPECT_EQ(calls(route, scattered(route, 64, 4, 2600)), 3u);
    // Of 48 KiB a plane.
    EXPECT_EQ(calls(route, scattered(route, 4096, 12, 69)), 1u);
    // At equal distances they are one box, however many.
    std::vector<CopyPiece> equal;
    for (size_t i = 0; i < 12'000; ++i) {
      equal.push_back({from(route) + (i + i / 4) * 128, to(route) + i * 64, 64});
    }
    EXPECT_EQ(shape_of(equal).plane, 4u);
    EXPECT_EQ(calls(route, equal), 1u);
  }
  // A box is no more than a call may move: six planes of 1 MiB; and a plane of 5,000,000 bytes.
  const CopyRoute route = CopyRoute::kToHost;
  std::vector<CopyPiece> six, large;
  for (size_t i = 0; i < 24; ++i) {
    six.push_back({from(route) + (i + i / 4) * 300'000, to(route) + i * 262'144, 262'144});
  }
  EXPECT_EQ(shape_of(six).plane, 4u);
  EXPECT_EQ(calls(route, six), 2u);
  for (size_t i = 0; i < 10; ++i) {
    const DevicePointer gap = i < 5 ? 0 : 4096;
    large.push_back({from(route) + i * (1 << 20) + gap, to(route) + i * (1 << 20), 1'000'000});
  }
  EXPECT_EQ(calls(route, large), 4u);
  EXPECT_LE(fake_.largest_copy(), Copier::kMostBytes);
}

// Layers of a box must not lie in each other, not even where they are read.
TEST_F(CopierTest, PlanesThatReadTheSameRowsAreNoBox) {
  const CopyWay boxes = CopyWay::kBoxes;
  for (const CopyRoute route : kRoutes) {
    for (const size_t apart : {0, 2, 4, 5}) {  // rows from plane to plane, which have four
      SCOPED_TRACE(std::string(name_of(route)) + ", " + std::to_string(apart));
      fill(from(route), apart);
      std::vector<CopyPiece> pieces;
      for (size_t i = 0; i < 12; ++i) {
        const size_t source = i / 4 * apart + i % 4;
        pieces.push_back({from(route) + source * 100, to(route) + (i + i / 4) * 100, 64});
      }
      expect_copied(route, pieces, &boxes);
    }
  }
}

// Planes that lie in each other are one batch; those that write the same bytes are none, and the
// last one's bytes stay.
TEST_F(CopierTest, PlanesThatWriteTheSameBytesAreNoBatch) {
  copier_->set_table(costs_that_favour(CopyWay::kBoxes));
  for (const CopyRoute route : kRoutes) {
    for (const auto& [apart, batches] :
         std::vector<std::pair<size_t, uint64_t>>{{128, 1}, {64, 1}, {63, 0}, {1, 0}, {0, 0}}) {
      SCOPED_TRACE(std::string(name_of(route)) + ", " + std::to_string(apart));
      fill(from(route), apart);
      std::vector<CopyPiece> pieces;
      for (size_t plane = 0; plane < 3; ++plane) {
        for (size_t row = 0; row < 6; ++row) {
          pieces.push_back(
              {from(route) + plane * 4100 + row * 100, to(route) + plane * apart + row * 1024, 64});
        }
      }
      const uint64_t before = fake_.calls_of("cuMemcpy3DBatchAsync");
      expect_copied(route, pieces, nullptr);
      EXPECT_EQ(fake_.calls_of("cuMemcpy3DBatchAsync") - before, batches);
    }
  }
}

// An error of another call is no refusal of the batch: it is said.
TEST_F(CopierTest, AnErrorOfRowsIsNoRefusalOfABatch) {
  copier_->set_table(costs_that_favour(CopyWay::kBoxes));
  const CopyRoute route = CopyRoute::kToHost;
  std::vector<CopyPiece> pieces = planes_backwards(from(route), to(route), 64, 4, 2);
  for (size_t i = 0; i < 4; ++i) pieces[4 + i].to = pieces[i].to;
  fake_.fail_next("cuMemcpy2DAsync", kOutOfMemory);
  EXPECT_EQ(copier_->copy(route, pieces).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(copier_->why_no_boxes(), "");
}

// Whatever the driver says, and at whichever of the calls: all is copied, nobody hears of it but
// who asks why, and the call is made no more.
TEST_F(CopierTest, ADriverThatRefusesABatchOfBoxesIsAskedForNoMore) {
  size_t call = 0;
  for (const CopyRoute route : kRoutes) {
    const std::vector<CopyPiece> pieces = planes_backwards(from(route), to(route), 64, 4, 2600);
    for (const Result says : {kNotSupported, kInvalidValue, kOutOfMemory}) {
      SCOPED_TRACE(testing::Message() << name_of(route) << ", " << says << ", call " << call);
      copier_->set_table(costs_that_favour(CopyWay::kBoxes));
      EXPECT_EQ(copier_->why_no_boxes(), "");
      const uint64_t before = fake_.calls_of("cuMemcpy3DBatchAsync");
      fake_.fail_next("cuMemcpy3DBatchAsync", says, 1, call);
      fill(from(route), before);
      expect_copied(route, pieces, nullptr);
      EXPECT_EQ(fake_.calls_of("cuMemcpy3DBatchAsync") - before, call + 1);
      expect_copied(route, pieces, nullptr);
      EXPECT_EQ(fake_.calls_of("cuMemcpy3DBatchAsync") - before, call + 1);
      EXPECT_THAT(copier_->explain(route, pieces),
                  HasSubstr("; no 3D batch: a batch of copies of planes: "));
      const CopyWay boxes = CopyWay::kBoxes;
      EXPECT_EQ(copier_->copy_by(boxes, route, pieces).code(),
                absl::StatusCode::kFailedPrecondition);
      call = (call + 1) % 3;
    }
    ++call;  // at each of the calls each route's first answer
  }
}

// One that refuses it from the start: the other ways are measured all the same.
TEST_F(CopierTest, MeasuringDoesWithoutWhatTheDriverRefuses) {
  for (const size_t after : {0, 3, 30}) {
    SCOPED_TRACE(after);
    copier_->set_table({});
    fake_.fail_next("cuMemcpy3DBatchAsync", kNotSupported, 1, after);
    ASSERT_TRUE(copier_->measure(3).ok());
    EXPECT_THAT(copier_->why_no_boxes(), HasSubstr("CUDA_ERROR"));
    const CopyRoute route = CopyRoute::kToDevice;
    const std::vector<CopyPiece> pieces = planes_of(from(route), to(route), 64, 4, 20);
    EXPECT_GT(copier_->table().nanoseconds(route, CopyWay::kRows, 4, 4 * 64), 1);
    const uint64_t calls = fake_.calls_of("cuMemcpy3DBatchAsync");
    fill(from(route), 1);
    expect_copied(route, pieces, nullptr);
    EXPECT_EQ(fake_.calls_of("cuMemcpy3DBatchAsync"), calls);
  }
}

// Lists of any shape, on every route, with tables that favour one way or the other.
TEST_F(CopierTest, AnyListIsCopiedWhateverTheTableSays) {
  for (uint64_t seed = 0; seed < 18; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const CopyRoute route = kRoutes[seed % 3];
    copier_->set_table(costs_that_favour(kAll[seed / 3]));
    std::vector<CopyPiece> pieces;
    const size_t most = size_t{1} << (4 + random() % 14);
    DevicePointer target = to(route) + random() % 64;
    for (size_t i = 0; i < 1 + random() % 700; ++i) {
      const size_t bytes = random() % most;
      const bool next = !pieces.empty() && random() % 3 == 0;  // a neighbour
      const DevicePointer source = next ? pieces.back().from + pieces.back().bytes
                                        : from(route) + random() % (kBytes - 2 * most);
      if (source + bytes > from(route) + kBytes || target + bytes > to(route) + kBytes) break;
      pieces.push_back({source, target, bytes});
      target += bytes + (seed % 2 == 0 ? 0 : random() % 40);
    }
    fill(from(route), seed + 100);
    expect_copied(route, pieces, nullptr);
  }
}

TEST_F(CopierTest, WhatTheTableFavoursIsCalled) {
  std::mt19937_64 random(3);
  const std::vector<CopyPiece> pieces =
      pages(from(CopyRoute::kToHost), to(CopyRoute::kToHost), 2048, 64, random);
  const auto calls = [&](CopyWay way) {
    copier_->set_table(costs_that_favour(way));
    const std::vector<uint64_t> before = {fake_.calls_of("cuMemcpyAsync"),
                                          fake_.calls_of("cuMemcpyBatchAsync"),
                                          fake_.calls_of("cuLaunchKernel")};
    EXPECT_TRUE(copier_->copy(CopyRoute::kToHost, pieces).ok());
    fake_.run_all();
    return std::vector<uint64_t>{fake_.calls_of("cuMemcpyAsync") - before[0],
                                 fake_.calls_of("cuMemcpyBatchAsync") - before[1],
                                 fake_.calls_of("cuLaunchKernel") - before[2]};
  };
  EXPECT_EQ(calls(CopyWay::kSingle), (std::vector<uint64_t>{64, 0, 0}));
  EXPECT_EQ(calls(CopyWay::kBatch), (std::vector<uint64_t>{0, 1, 0}));
  EXPECT_EQ(calls(CopyWay::kPacked), (std::vector<uint64_t>{1, 0, 1}));
  EXPECT_EQ(calls(CopyWay::kKernel), (std::vector<uint64_t>{0, 0, 1}));
}

// A batch's pieces move in any order, and the driver takes none that write the same bytes.
TEST_F(CopierTest, PiecesThatWriteTheSameBytesAreNoBatch) {
  copier_->set_table(costs_that_favour(CopyWay::kBatch));
  const CopyRoute route = CopyRoute::kToDevice;
  constexpr size_t kPage = 256;
  fill(from(route), 5);
  const std::string source = bytes_at(from(route));
  // The same page again and again; pages that overlap by half; backwards; backwards without.
  for (const auto& [step, batches] : std::vector<std::pair<int, uint64_t>>{
           {0, 0}, {kPage / 2, 0}, {-static_cast<int>(kPage) / 2, 0}, {-2 * int{kPage}, 2}}) {
    SCOPED_TRACE(step);
    fill(to(route), 6);
    std::vector<CopyPiece> pieces;
    for (int i = 0; i < 1200; ++i) {  // more than one batch's
      pieces.push_back({from(route) + 2 * i * kPage, to(route) + (1 << 20) + i * step, kPage});
    }
    const uint64_t before = fake_.calls_of("cuMemcpyBatchAsync");
    expect_copied(route, pieces, nullptr);  // and so in their order
    EXPECT_EQ(fake_.calls_of("cuMemcpyBatchAsync") - before, batches);
  }
}

// Five launches, and lists for four: the last goes without.
TEST_F(CopierTest, WhenAllListsAreInUseItGoesWithoutKernels) {
  copier_->set_table(costs_that_favour(CopyWay::kKernel));
  const CopyRoute route = CopyRoute::kOnDevice;
  fill(from(route), 1);
  const std::string source = bytes_at(from(route));
  for (size_t i = 0; i < 12; ++i) {
    const std::vector<CopyPiece> two = {
        {from(route) + i * 4096, to(route) + i * 4096, 100},
        {from(route) + i * 4096 + 200, to(route) + i * 4096 + 300, 100}};
    ASSERT_TRUE(copier_->copy(route, two).ok());
  }
  fake_.run_all();
  for (size_t i = 0; i < 12; ++i) {
    EXPECT_EQ(fake_.read(to(route) + i * 4096, 100), source.substr(i * 4096, 100));
    EXPECT_EQ(fake_.read(to(route) + i * 4096 + 300, 100), source.substr(i * 4096 + 200, 100));
  }
}

// A launch whose mark could not be made still reads its list: the next one gets another.
TEST_F(CopierTest, AListThatALaunchStillReadsIsNotUsedAgain) {
  const CopyRoute route = CopyRoute::kOnDevice;
  fill(from(route), 1);
  const std::string source = bytes_at(from(route));
  const auto two = [&](size_t at) {
    return std::vector<CopyPiece>{{from(route) + at, to(route) + at, 100},
                                  {from(route) + at + 200, to(route) + at + 300, 100}};
  };
  for (int i = 0; i < 20; ++i) {  // what the stream has to do before
    ASSERT_TRUE(copier_->copy_by(CopyWay::kSingle, route, two(8192)).ok());
  }
  fake_.fail_next("cuEventRecord", kOutOfMemory);
  EXPECT_FALSE(copier_->copy_by(CopyWay::kKernel, route, two(0)).ok());
  ASSERT_TRUE(copier_->copy_by(CopyWay::kKernel, route, two(4096)).ok());
  fake_.run_all();
  for (const size_t at : {0, 4096}) {
    EXPECT_EQ(fake_.read(to(route) + at, 100), source.substr(at, 100));
    EXPECT_EQ(fake_.read(to(route) + at + 300, 100), source.substr(at + 200, 100));
  }
}

TEST_F(CopierTest, MeasuringFillsTheTable) {
  ASSERT_TRUE(copier_->measure(1).ok());
  for (const CopyRoute route : kRoutes) {
    for (const CopyWay way : kAll) {
      const double cost = copier_->table().nanoseconds(route, way, 10, 10 << 14);
      EXPECT_EQ(cost >= 1e18, route == CopyRoute::kOnDevice && way == CopyWay::kPacked);
      EXPECT_GT(cost, 0);
    }
  }
}

TEST(Copier, WithoutKernelsAndBatchesItCopiesPieceByPiece) {
  FakeDriver fake({.missing = {"cuMemcpyBatchAsync"}});
  {
    const auto device = Device::open(FakeDriver::driver(), 0);
    const DevicePointer memory = fake.allocate(4 << 20);
    auto copier = Copier::open(**device, nullptr, (*device)->stream(Direction::kToHost));
    ASSERT_TRUE(copier.ok()) << copier.status();
    const std::vector<CopyPiece> pieces = {{memory, memory + 4096, 10},
                                           {memory + 20, memory + 9000, 30}};
    EXPECT_EQ((*copier)->explain(CopyRoute::kOnDevice, pieces),
              "2 pieces, 40 bytes, on device: single 0.0 us");
    fake.write(memory, "0123456789");
    EXPECT_TRUE((*copier)->copy(CopyRoute::kOnDevice, pieces).ok());
    fake.run_all();
    EXPECT_EQ(fake.read(memory + 4096, 10), "0123456789");
    fake.free(memory);
  }
  EXPECT_THAT(fake.finish(), IsEmpty());
}

TEST(Copier, WithoutBatchesOfBoxesPlanesAreCopiedOneByOne) {
  for (const bool old : {false, true}) {
    FakeOptions options{.version = old ? 12080 : 13000};
    if (!old) options.missing = {"cuMemcpy3DBatchAsync"};
    FakeDriver fake(std::move(options));
    {
      const auto device = Device::open(FakeDriver::driver(), 0);
      const DevicePointer memory = fake.allocate(4 << 20);
      auto copier = Copier::open(**device, nullptr, (*device)->stream(Direction::kToHost));
      ASSERT_TRUE(copier.ok()) << copier.status();
      (*copier)->set_table(costs_that_favour(CopyWay::kBoxes));
      const CopyRoute route = CopyRoute::kOnDevice;
      const std::vector<CopyPiece> pieces = planes_of(memory, memory + (1 << 20), 512, 8, 3);
      EXPECT_THAT((*copier)->explain(route, pieces),
                  testing::EndsWith(
                      "; no 3D batch: the driver lacks cuMemcpy3DBatchAsync as of CUDA 13.0"));
      EXPECT_EQ((*copier)->copy_by(CopyWay::kBoxes, route, pieces).code(),
                absl::StatusCode::kFailedPrecondition);
      fake.write(memory, "0123456789");
      EXPECT_TRUE((*copier)->copy(route, pieces).ok());
      fake.run_all();
      EXPECT_EQ(fake.read(memory + (1 << 20), 10), "0123456789");
      fake.free(memory);
    }
    EXPECT_THAT(fake.finish(), IsEmpty());
  }
}

TEST(Copier, ALossIsNoRefusal) {
  FakeDriver fake;
  const auto device = Device::open(FakeDriver::driver(), 0);
  const DevicePointer memory = fake.allocate(4 << 20);
  auto copier = Copier::open(**device, nullptr, (*device)->stream(Direction::kToHost));
  ASSERT_TRUE(copier.ok()) << copier.status();
  (*copier)->set_table(costs_that_favour(CopyWay::kBoxes));
  const std::vector<CopyPiece> pieces = planes_of(memory, memory + (1 << 20), 64, 4, 20);
  fake.fail_next("cuMemcpy3DBatchAsync", kIllegalAddress);
  EXPECT_EQ((*copier)->copy(CopyRoute::kOnDevice, pieces).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(fake.copies(), 1u);
  fake.lose();
}

}  // namespace
}  // namespace baton::gpudirect
