/* Python's headers, so that what any version builds is right in each that loads it.
 *
 * Those of 3.12 and 3.13 take None, True and False for immortal, which they are not in 3.11. */
#ifndef TXNKV_NATIVE_STABLE_ABI_H
#define TXNKV_NATIVE_STABLE_ABI_H

#include <Python.h>

#undef Py_RETURN_NONE
#undef Py_RETURN_TRUE
#undef Py_RETURN_FALSE
#define Py_RETURN_NONE return Py_NewRef(Py_None)
#define Py_RETURN_TRUE return Py_NewRef(Py_True)
#define Py_RETURN_FALSE return Py_NewRef(Py_False)

#endif
