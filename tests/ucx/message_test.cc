// Introductions and envelopes: what is written is read again, and nothing that is cut short is.
#include "transport/ucx/message.h"
#include "tests/test.h"

namespace baton::ucx {
namespace {

TEST(UcxMessage, AnIntroductionIsReadAsItWasWritten) {
  const Introduction out{7, std::string("an address\0of UCX", 17)};
  const std::string words = out.encode();
  const auto in = Introduction::decode(words);
  ASSERT_TRUE(in.has_value());
  EXPECT_EQ(*in, out);
}

TEST(UcxMessage, AnIntroductionWithoutAnAddressIsNone) {
  const std::string words = Introduction{7, "x"}.encode();
  for (size_t size = 0; size < words.size(); ++size) {
    EXPECT_FALSE(Introduction::decode(std::string_view(words).substr(0, size)).has_value()) << size;
  }
}

TEST(UcxMessage, AnEnvelopeIsReadAsItWasWritten) {
  const Envelope out{0xfedcba98, 0x8877665544332211};
  char bytes[Envelope::kBytes];
  out.encode(bytes);
  EXPECT_EQ(Envelope::decode({bytes, sizeof bytes}), out);
}

}  // namespace
}  // namespace baton::ucx
