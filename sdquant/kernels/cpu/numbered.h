/* A macro for each of some numbers, from 0 on: for sums that have names, since compilers keep arrays of them in memory. */
#ifndef SDQUANT_NUMBERED_H
#define SDQUANT_NUMBERED_H

#define ONE(X) X(0)
#define TWO(X) ONE(X) X(1)
#define THREE(X) TWO(X) X(2)
#define FOUR(X) THREE(X) X(3)
#define FIVE(X) FOUR(X) X(4)
#define SIX(X) FIVE(X) X(5)
#define SEVEN(X) SIX(X) X(6)
#define EIGHT(X) SEVEN(X) X(7)
#define NINE(X) EIGHT(X) X(8)
#define TEN(X) NINE(X) X(9)
#define ELEVEN(X) TEN(X) X(10)
#define TWELVE(X) ELEVEN(X) X(11)

#endif
